"""What a rival costs, counted while it runs: the same counter for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...data.eval_mode import evaluating
from ...data.model_runs import member_logits
from ...hosts.operation_count import multiply_adds


@dataclass(frozen=True)
class RelativeCost:
    """A rival's cost divided by the host's.

    Attributes:
        multiply_adds: Of one batch, in matrix products, convolutions and attention.
        parameters: Distinct numbers stored.
    """

    multiply_adds: float
    parameters: float

    def __str__(self) -> str:
        return f"{self.multiply_adds:.2f} x multiply-adds, {self.parameters:.2f} x parameters"


def relative_cost(model: nn.Module, host: nn.Module, batch: Any) -> RelativeCost:
    """Count a rival and its host on one batch by running both.

    `hydra_ensembles.cost` counts from shapes and knows hosts and ensembles only. This one counts
    anything that runs; where both apply, they agree.
    """
    return RelativeCost(
        _multiply_adds(model, batch) / _multiply_adds(host, batch),
        _parameters(model) / _parameters(host),
    )


def _multiply_adds(model: nn.Module, batch: Any) -> int:
    # plain matrix products inside attention: fused kernels are not all known to the counter
    with evaluating(model), sdpa_kernel(SDPBackend.MATH):
        return multiply_adds(lambda: member_logits(model, batch))


def _parameters(model: nn.Module) -> int:
    """Count numbers, tensors that share memory once."""
    stored: dict[tuple[Any, ...], int] = {}
    for parameter in model.parameters():
        stored[(parameter.device, parameter.data_ptr(), parameter.shape)] = parameter.numel()
    return sum(stored.values())
