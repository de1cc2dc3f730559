"""What members share: averages of modules, and which of their parts are equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def same(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules hold equal parameters and buffers."""
    if first is second:
        return True
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def identities(modules: Sequence[Sequence[nn.Module]]) -> list[int]:
    """Number members by the content of their modules: equal content, equal number."""
    distinct: list[Sequence[nn.Module]] = []
    numbers = []
    for parts in modules:
        for number, other in enumerate(distinct):
            if all(same(a, b) for a, b in zip(parts, other, strict=True)):
                numbers.append(number)
                break
        else:
            numbers.append(len(distinct))
            distinct.append(parts)
    return numbers


@torch.no_grad()
def average_(target: nn.Module, sources: Sequence[nn.Module], *, but: str | None = None) -> bool:
    """Set a module's floating-point state to the mean of others; return whether they differed.

    W = mean_m W^(m), b = mean_m b^(m) (Hydra Ensembles, the merged MLP). Equal sources change
    nothing, to the last bit. The submodule `but` keeps its own state ("" is the whole module).
    """
    differ = False
    states = [source.state_dict() for source in sources]
    for name, tensor in target.state_dict().items():
        if but is not None and f".{name}".startswith(f".{but}." if but else "."):
            continue
        if any(not torch.equal(states[0][name], state[name]) for state in states[1:]):
            differ = True
            if tensor.is_floating_point():
                tensor.copy_(mean([state[name] for state in states]))
    return differ


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Average tensors in float64 (a mean of equal ones is exact)."""
    return torch.stack([t.double() for t in tensors]).mean(0).to(tensors[0].dtype)
