"""Head importance: how far the loss moves with each head's gate (Michel et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..heads.masks import HeadScores
from .base import GateGradient, criteria


@criteria.register("his")
@dataclass(frozen=True)
class HeadImportance(GateGradient):
    """Mean absolute per-sample gradient of the loss in a head's gate: E_x |dL(x)/dg_h| at g = 1.

    Equal to E_x |<grad_{A_h} L(x), A_h(x)>|. The absolute value is taken *per sample*: scripts
    that take it per batch agree with this at batch size 1 only.

    Args:
        normalize_layers: Divide every layer's scores by their L2 norm.
    """

    normalize_layers: bool = False

    def accumulate(self, gradients: Tensor) -> Tensor:
        """Sum absolute gradients: `[batch, heads]` to `[heads]`."""
        return gradients.abs().sum(0)

    def finish(self, mean: HeadScores) -> HeadScores:
        """Normalise within layers when asked to."""
        return mean.normalized() if self.normalize_layers else mean
