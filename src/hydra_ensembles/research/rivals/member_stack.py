"""Members one by one or folded into the batch, and an uncertainty that logits carry along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import map_tensors
from ...data.model_runs import member_logits_of


class MemberStack(nn.Module):
    """Run models one after another: logits `[batch, member, class]`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with every model's logits."""
        return torch.cat([member_logits_of(m(*args, **kwargs)) for m in self.models], dim=1)


class Folded(nn.Module):
    """Run a host whose answer holds the members one after another: `[member * batch, class]`.

    For hosts whose layers know that row m * batch + i belongs to member m (BatchEnsemble), that
    treat every row by itself (dropout), or that fold by themselves (Packed-Ensembles).

    Args:
        host: Answers with logits.
        members: How many.
        repeat: Whether the host is given its batch once per member.
    """

    def __init__(self, host: nn.Module, members: int, *, repeat: bool = True) -> None:
        super().__init__()
        self.host = host
        self.members = members
        self.repeat = repeat

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with logits `[batch, member, class]`."""
        if self.repeat:
            args, kwargs = map_tensors(self._repeated, args), map_tensors(self._repeated, kwargs)
        folded = member_logits_of(self.host(*args, **kwargs))[:, 0]
        return folded.unflatten(0, (self.members, -1)).transpose(0, 1)

    def _repeated(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.members, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor


def carry_uncertainty(logits: Tensor, uncertainty: Tensor) -> Tensor:
    """Shift logits so that their energy is a given uncertainty; no probability changes.

    z' = z - logsumexp(z) - u has softmax(z') = softmax(z) and energy -logsumexp(z') = u: a score
    that no function of the logits could find travels with them, and the score `energy` reads it.

    Args:
        logits: `[batch, class]`.
        uncertainty: `[batch]`.
    """
    return logits.log_softmax(-1) - uncertainty[:, None]
