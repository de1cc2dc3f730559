"""Listen to the trunk while it runs: one or two token summaries per block, nothing else is kept.

The hooks stay on the trunk's blocks and do nothing unless a collector is set for the running call.
It lives in a context variable, so that calls from several threads do not mix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_active: ContextVar[Collector | None] = ContextVar("hydra_taps", default=None)
_attaching = threading.Lock()


class Collector:
    """Token summaries of one call.

    Args:
        mask: True or 1 where a token is no padding, `[batch, tokens]`; None when all are.
        readout: Whether the classifier reads a token of its own (not the mean of all).
        positions: The readout token of each sample `[batch]`; None for token 0.
    """

    def __init__(
        self, mask: Tensor | None = None, *, readout: bool = True, positions: Tensor | None = None
    ) -> None:
        self._mask, self._readout, self._positions = mask, readout, positions
        self._weights: Tensor | None = None
        self._rows: dict[int, list[Tensor]] = {}

    def take(self, block: int, hidden: Tensor) -> None:
        """Summarise the hidden states `[batch, tokens, width]` after a block."""
        if block in self._rows:  # members that run one by one share the trunk
            return
        rows = []
        if self._readout:
            rows.append(self._readout_token(hidden))
        rows.append(self._mean_token(hidden))
        self._rows[block] = rows

    def _readout_token(self, hidden: Tensor) -> Tensor:
        if self._positions is None:
            return hidden[:, 0].clone()  # a view would keep all hidden states
        return hidden[torch.arange(len(hidden), device=hidden.device), self._positions]

    def _mean_token(self, hidden: Tensor) -> Tensor:
        mask = self._mask
        if mask is None or mask.shape != hidden.shape[:2]:
            return hidden.mean(1)
        if self._weights is None:
            weights = mask.to(hidden.dtype)
            self._weights = (weights / weights.sum(1, keepdim=True).clamp_min(1))[:, None]
        return torch.bmm(self._weights, hidden)[:, 0]

    def summaries(self) -> Tensor:
        """Return the token summaries, `[batch, tap, width]`, block by block."""
        return torch.stack([row for block in sorted(self._rows) for row in self._rows[block]], 1)


def tap_names(blocks: int, *, readout: bool) -> tuple[str, ...]:
    """Name the taps in the order of `Collector.summaries`."""
    kinds = ("readout token", "mean token") if readout else ("mean token",)
    return tuple(f"block {block}, {kind}" for block in range(blocks) for kind in kinds)


@contextmanager
def collecting(blocks: nn.ModuleList, collector: Collector) -> Iterator[Collector]:
    """Let a collector listen to blocks during one call, in this thread."""
    with _attaching:  # one thread adds the hooks, the others wait for it
        for number, block in enumerate(blocks):
            if not any(_is_tap(hook) for hook in block._forward_hooks.values()):
                block.register_forward_hook(partial(_tap, number))
    token = _active.set(collector)
    try:
        yield collector
    finally:
        _active.reset(token)


def _tap(block: int, module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():  # a graph of the model has no listeners
        return
    collector = _active.get()
    if collector is not None:
        collector.take(block, output[0] if isinstance(output, tuple) else output)


def _is_tap(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _tap
