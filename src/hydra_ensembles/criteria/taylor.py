"""Taylor: the first-order change of the mean loss when a head goes (Molchanov et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..heads.masks import HeadScores
from .base import GateGradient, criteria


@criteria.register("taylor")
@dataclass(frozen=True)
class Taylor(GateGradient):
    """Absolute mean gradient of the loss in a head's gate: |E_x[dL(x)/dg_h]| at g = 1.

    Closing the gate changes the mean loss by -E_x[dL(x)/dg_h] to first order. Samples of opposite
    sign cancel here; in `his` they do not.
    """

    def accumulate(self, gradients: Tensor) -> Tensor:
        """Sum signed gradients: `[batch, heads]` to `[heads]`."""
        return gradients.sum(0)

    def finish(self, mean: HeadScores) -> HeadScores:
        """Take the absolute value after the mean."""
        return mean.map(Tensor.abs)
