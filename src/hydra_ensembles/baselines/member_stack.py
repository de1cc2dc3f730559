"""Members one by one or folded into the batch, and an uncertainty that logits carry along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.running import member_logits_of


class Members(nn.Module):
    """Run models one after another: logits `[batch, member, class]`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with every model's logits."""
        return torch.cat([member_logits_of(m(*args, **kwargs)) for m in self.models], dim=1)


class Folded(nn.Module):
    """Run a host on its batch repeated for each member, member by member.

    For hosts whose layers know that row m * batch + i belongs to member m (BatchEnsemble), or that
    treat every row by itself (dropout).
    """

    def __init__(self, host: nn.Module, members: int) -> None:
        super().__init__()
        self.host = host
        self.members = members

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with logits `[batch, member, class]`."""
        folded = self.host(*self._repeat(args), **self._repeat(kwargs))
        return member_logits_of(folded)[:, 0].unflatten(0, (self.members, -1)).transpose(0, 1)

    def _repeat(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            return value.repeat(self.members, *[1] * (value.ndim - 1))
        if isinstance(value, Mapping):
            return {key: self._repeat(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._repeat(inner) for inner in value)
        return value


def carry_uncertainty(logits: Tensor, uncertainty: Tensor) -> Tensor:
    """Shift logits so that their energy is a given uncertainty; no probability changes.

    z' = z - logsumexp(z) - u has softmax(z') = softmax(z) and energy -logsumexp(z') = u: a score
    that no function of the logits could find travels with them, and the score `energy` reads it.

    Args:
        logits: `[batch, class]`.
        uncertainty: `[batch]`.
    """
    return logits.log_softmax(-1) - uncertainty[:, None]
