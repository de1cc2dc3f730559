"""Energy: how much a head or a neuron writes to the states, whatever the loss is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .criterion import OutputScore, criteria


@criteria.register("energy")
@dataclass(frozen=True)
class Energy(OutputScore):
    """Mean squared norm, over tokens, of what a unit adds to the states; no labels are needed.

    Of a head, E|A_h W_O,h|^2 = tr(W_O,h^T E[A_h^T A_h] W_O,h); of a neuron, E[u_j^2] |w_j|^2.
    Padding does not count.
    """

    def total(self, values: Tensor, weight: Tensor) -> Tensor:
        """Sum squared norms: `[tokens, units, width]` and `[units, states, width]` to `[units]`."""
        if values.shape[2] == 1:
            return values.square().sum((0, 2)) * weight.square().sum((1, 2))
        second_moment = torch.einsum("tuv,tuw->uvw", values, values)
        return (second_moment * torch.einsum("usv,usw->uvw", weight, weight)).sum((1, 2))
