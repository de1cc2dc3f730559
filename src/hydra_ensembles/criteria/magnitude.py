"""Magnitude: the norm of a head's weights (Han et al., 2015, at the grain of heads)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..hosts import HostModel
from .base import WeightScore, criteria


@criteria.register("magnitude")
@dataclass(frozen=True)
class Magnitude(WeightScore):
    """L2 norm of the head's rows of W_Q, W_K, W_V and columns of W_O, taken together.

    sqrt(|W_Q^h|^2 + |W_K^h|^2 + |W_V^h|^2 + |W_O^h|^2). With grouped queries every head counts
    the keys and values that it reads.
    """

    def score(self, host: HostModel) -> list[Tensor]:
        """Return `[heads]` for every layer."""
        rows = []
        for site in host.sites:
            weights = site.weights()
            parts = (weights.query, weights.key, weights.value, weights.output)
            squares = [part.detach().double().square().sum((1, 2)) for part in parts]
            rows.append(sum(squares[1:], squares[0]).sqrt())
        return rows
