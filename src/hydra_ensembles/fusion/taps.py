"""Listen to the trunk while it runs: one or two token summaries per block, nothing else is kept.

Members that branch at the first block share no trunk. There the body itself is listened to: what
enters it (the embeddings, the same for all members) and what leaves it (the members' mean).

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

from ..errors import UnsupportedModelError

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

    def take_body(self, entering: Tensor, leaving: Tensor) -> None:
        """Summarise what enters and leaves a body without a trunk."""
        if self._rows:
            return
        # the members' streams are a larger batch; readout-only blocks leave the readout token first
        streams = leaving.unflatten(0, (-1, len(entering))).mean(0)
        last = streams[:, 0].clone() if self._readout else streams.mean(1)
        self._rows[0] = [self._mean_token(entering), last]

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
        if not self._rows:
            raise UnsupportedModelError(
                "Nothing was heard: members that share no block and run one by one have no common "
                'features. Set ensemble.mode = "fused".'
            )
        return torch.stack([row for block in sorted(self._rows) for row in self._rows[block]], 1)


def tap_names(blocks: int, *, readout: bool) -> tuple[str, ...]:
    """Name the taps in the order of `Collector.summaries`, of a trunk with so many blocks."""
    if not blocks:
        return ("embeddings, mean token", "last block, mean of members")
    kinds = ("readout token", "mean token") if readout else ("mean token",)
    return tuple(f"block {block}, {kind}" for block in range(blocks) for kind in kinds)


@contextmanager
def collecting(body: Any, collector: Collector) -> Iterator[Collector]:
    """Let a collector listen to a body during one call, in this thread."""
    taps = [(block, partial(_tap, number)) for number, block in enumerate(body.trunk)]
    with _attaching:  # one thread adds the hooks, the others wait for it
        for module, hook in taps or [(body, partial(_tap_body))]:
            if not any(_is_tap(known) for known in module._forward_hooks.values()):
                module.register_forward_hook(hook)
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


def _tap_body(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    collector = _active.get()
    if collector is not None:
        collector.take_body(args[0], output[0] if isinstance(output, tuple) else output)


def _is_tap(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func in (_tap, _tap_body)
