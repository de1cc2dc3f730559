"""Fisher: the second moment of the gate's gradient (Theis et al., 2018; Kwon et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import GateGradient, criteria


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
