"""Head importance: how far the loss moves with each head's gate (Michel et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..heads.head_mask import HeadScores
from .criterion import GateGradient, criteria


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


# Taylor: the first-order change of the mean loss when a head goes (Molchanov et al., 2017).
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


# Fisher: the second moment of the gate's gradient (Theis et al., 2018; Kwon et al., 2022).
@criteria.register("fisher")
@dataclass(frozen=True)
class Fisher(GateGradient):
    """Mean squared per-sample gradient of the loss in a head's gate: E_x (dL(x)/dg_h)^2 at g = 1.

    This is the diagonal of the empirical Fisher information in the gates, an approximation of the
    Hessian of the loss: half of it is the second-order change of the loss when the head goes.
    """

    def accumulate(self, gradients: Tensor) -> Tensor:
        """Sum squared gradients: `[batch, heads]` to `[heads]`."""
        return gradients.square().sum(0)
