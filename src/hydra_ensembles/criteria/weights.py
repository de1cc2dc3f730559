"""Magnitude: the norm of a head's weights (Han et al., 2015, at the grain of heads)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hosts import HostModel
from ..hosts.head_weights import linear_weight
from .criterion import WeightScore, criteria


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

    def score_neurons(self, host: HostModel) -> list[Tensor]:
        """Return the norm of each neuron's rows of the first linears and column of the second."""
        rows = []
        for block, site in zip(host.blocks, host.mlps, strict=True):
            if isinstance(site, str):
                rows.append(torch.zeros(0))
                continue
            weights = [
                linear_weight(block.module.get_submodule(path)).detach().double().cpu()
                for path in (*site.first, site.second)
            ]
            total = weights[-1].square().sum(0)
            for weight in weights[:-1]:
                total = total.index_add(0, torch.tensor(site.by_row()), weight.square().sum(1))
            rows.append(total.sqrt())
        return rows


# Random scores: the baseline that every criterion has to beat.
@criteria.register("random")
@dataclass(frozen=True)
class RandomOrder(WeightScore):
    """Seeded uniform numbers in [0, 1); neither weights nor data are read.

    Args:
        seed: Of the draw; equal seeds give equal scores on any device.
    """

    seed: int = 0

    def score(self, host: HostModel) -> list[Tensor]:
        """Draw `[heads]` for every layer."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(heads, generator=generator) for heads in host.head_counts]

    def score_neurons(self, host: HostModel) -> list[Tensor]:
        """Draw `[neurons]` for every layer."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [torch.rand(neurons, generator=generator) for neurons in host.neuron_counts]
