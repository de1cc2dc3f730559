"""Listen to the blocks while they run: one or two token summaries per block of the trunk, and one
of what leaves the last block, averaged over the members. Nothing else is kept.

Members that branch at the first block share no trunk: there the embeddings are listened to.

The hooks stay on the blocks and do nothing unless a collector is set for the running call. It lives
in a context variable, so that calls from several threads do not mix.
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

from ..hosts.block_calls import states_of, take_call
from ..uncertainty.distances import full_precision

_active: ContextVar[Collector | None] = ContextVar("hydra_taps", default=None)
_attaching = threading.Lock()


class Collector:
    """Token summaries of one call.

    Args:
        mask: True or 1 where a token is no padding, `[batch, tokens]`; None when all are.
        readout: Whether the classifier reads a token of its own (not the mean of all).
        positions: The readout token of each sample `[batch]`; None for token 0.
        streams: Members' streams that leave the last block at once, folded into the batch.
    """

    def __init__(
        self,
        mask: Tensor | None = None,
        *,
        readout: bool = True,
        positions: Tensor | None = None,
        streams: int = 1,
    ) -> None:
        self._mask, self._readout, self._positions = mask, readout, positions
        self._streams = streams
        self._weights: Tensor | None = None
        self._rows: dict[int, list[Tensor]] = {}
        self._ends: list[Tensor] = []

    def take(self, block: int, hidden: Tensor) -> None:
        """Summarise the hidden states `[batch, tokens, width]` after a block."""
        if block not in self._rows:  # members that run one by one share the trunk
            self._rows[block] = list(self._summarised(hidden).unbind(1))

    def _summarised(self, hidden: Tensor) -> Tensor:
        """Return the summaries `[batch, summary, width]`, in float32 whatever the host runs in."""
        with full_precision(hidden):
            hidden = hidden.float()
            return torch.matmul(self._token_weights(hidden), hidden)

    def _token_weights(self, hidden: Tensor) -> Tensor:
        """Return what sums tokens to summaries, `[batch or 1, summary, tokens]`: one product."""
        if self._weights is None or self._weights.shape[-1] != hidden.shape[1]:
            batch, tokens = hidden.shape[:2]
            mask = self._mask
            if mask is None or mask.shape != (batch, tokens):
                mask = hidden.new_ones(1, tokens)
            mask = mask.to(hidden.dtype)
            mean = (mask / mask.sum(1, keepdim=True).clamp_min(1))[:, None]
            self._weights = mean
            if self._readout:
                places = torch.arange(tokens, device=hidden.device)
                position = 0 if self._positions is None else self._positions[:, None]
                chosen = (places == position).to(hidden.dtype).view(-1, 1, tokens)
                # no len(): an exported graph is for any size of batch
                rows = 1 if self._positions is None and mean.shape[0] == 1 else batch
                parts = [part.expand(rows, -1, -1) for part in (chosen, mean)]
                self._weights = torch.cat(parts, 1)
        return self._weights

    def enter(self, hidden: Tensor) -> None:
        """Summarise what enters a body without a trunk: the embeddings."""
        self._rows.setdefault(0, [self._summarised(hidden)[:, -1]])

    def leave(self, hidden: Tensor) -> None:
        """Summarise what leaves the last block: the members' streams, folded into the batch.

        A host that runs once per stream comes here once per stream.
        """
        mean = hidden.float().unflatten(0, (self._streams, -1)).mean(0)
        if self._weights is not None and mean.shape[1] == self._weights.shape[-1]:
            self._ends.append(self._summarised(mean)[:, 0])
        else:  # readout-only blocks leave the readout token first
            self._ends.append(mean[:, 0].clone())

    def summaries(self) -> Tensor:
        """Return the token summaries, `[batch, tap, width]`, block by block."""
        end = torch.stack(self._ends).mean(0)
        rows = [row for block in sorted(self._rows) for row in self._rows[block]]
        return torch.stack([*rows, end], 1)


def tap_names(blocks: int, *, readout: bool) -> tuple[str, ...]:
    """Name the taps in the order of `Collector.summaries`, of a trunk with so many blocks."""
    kinds = ("readout token", "mean token") if readout else ("mean token",)
    trunk = [f"block {block}, {kind}" for block in range(blocks) for kind in kinds]
    return (*(trunk or ["embeddings, mean token"]), "last block, mean of members")


@contextmanager
def collecting(body: Any, collector: Collector) -> Iterator[Collector]:
    """Let a collector listen to a body during one call, in this thread."""
    first, last = (body, body) if isinstance(body, nn.Module) else (body.layers[0], body.layers[-1])
    taps = [(block, partial(_tap, number)) for number, block in enumerate(body.trunk)]
    taps = taps or [(first, partial(_tap_entering))]
    taps.append((last, partial(_tap_leaving)))
    with _attaching:  # one thread adds the hooks, the others wait for it
        for module, hook in taps:
            known = module._forward_hooks.values()
            if not any(isinstance(h, partial) and h.func is hook.func for h in known):
                module.register_forward_hook(hook, with_kwargs=True)
    token = _active.set(collector)
    try:
        yield collector
    finally:
        _active.reset(token)


def _tap(block: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    collector = _listening()
    if collector is not None:
        collector.take(block, _as_tokens(states_of(output)[0]))


def _tap_entering(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    collector = _listening()
    if collector is not None:
        collector.enter(_as_tokens(take_call(args, kwargs).hidden))


def _tap_leaving(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    collector = _listening()
    if collector is not None:
        collector.leave(_as_tokens(states_of(output)[0]))


def _as_tokens(hidden: Tensor) -> Tensor:
    """Return states `[batch, y, x, width]`, as Swin has them, as `[batch, tokens, width]`."""
    return hidden.flatten(1, -2) if hidden.dim() > 3 else hidden


def _listening() -> Collector | None:
    # a compiled graph has no listeners; an exported one, which runs this code once, has
    return None if torch.compiler.is_dynamo_compiling() else _active.get()
