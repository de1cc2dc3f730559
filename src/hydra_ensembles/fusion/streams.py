"""Parts that streams share or own, and the folded batch that they work on.

Streams are folded into the batch, stream-major: x is [streams * batch, tokens, width].
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.eval_mode import twin
from .call_options import running_call


class PerStream(nn.Module):
    """One module for all streams if they agree, otherwise one per stream."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each stream's module to its part of the folded batch."""
        if len(self.each) == 1:
            return self.each[0](x)
        parts = streams_of(x, len(self.each))
        return torch.cat([module(part) for module, part in zip(self.each, parts, strict=True)])

    def of(self, stream: int) -> nn.Module:
        """Return the module of a stream."""
        return self.each[stream if len(self.each) > 1 else 0]

    def untie_(self, streams: int) -> None:
        """Give every stream its own copy, in place."""
        if len(self.each) == 1:
            self.each.extend([copy.deepcopy(self.each[0]) for _ in range(streams - 1)])


class PerEnd(PerStream):
    """A module after the blocks of a host that runs once per stream: that of the running stream."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module of the stream that the host runs in this pass."""
        return self.of(running_call().end or 0)(x)


def of_stream(module: nn.Module, stream: int) -> nn.Module:
    """Return a module as one stream runs it; parameters are shared."""
    if isinstance(module, PerStream):
        return module.of(stream)
    inner = [n for n, part in module.named_modules() if isinstance(part, PerStream)]
    result = twin(module) if inner else module
    for name in inner:
        result.set_submodule(name, result.get_submodule(name).of(stream))  # type: ignore[operator]
    return result


class OutputBias(nn.Module):
    """The bias of W_O: [1 or streams, width]."""

    def __init__(self, biases: Tensor | None) -> None:
        super().__init__()
        self.value = None if biases is None else nn.Parameter(biases.detach().clone())

    def of(self, stream: int) -> Tensor | None:
        """Return the bias of a stream."""
        if self.value is None:
            return None
        return self.value[stream if len(self.value) > 1 else 0]

    def untie_(self, streams: int) -> None:
        """Give every stream its own copy, in place."""
        if self.value is not None and len(self.value) == 1:
            self.value = nn.Parameter(self.value.detach().repeat(streams, 1))


def streams_of(x: Tensor, streams: int) -> tuple[Tensor, ...]:
    """Split a folded batch into its streams; unlike `chunk`, compiles for any batch size."""
    return x.unflatten(0, (streams, -1)).unbind(0)


def select_streams(x: Tensor, parents: Sequence[int], inputs: int) -> Tensor:
    """Select every stream's input from the folded inputs."""
    streams = streams_of(x, inputs)
    return torch.cat([streams[parent] for parent in parents])


def add_residual(attended: Tensor, residual: Tensor, parents: Sequence[int], inputs: int) -> Tensor:
    """Add every stream's residual to its attention output."""
    if tuple(parents) == tuple(range(inputs)):
        return attended + residual
    if inputs == 1:
        return (attended.unflatten(0, (len(parents), -1)) + residual).flatten(0, 1)
    return attended + select_streams(residual, parents, inputs)
