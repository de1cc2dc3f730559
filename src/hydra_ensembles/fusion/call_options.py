"""What one call asks of the fused blocks in addition to the host's arguments.

The host's own code runs between an ensemble and its blocks and cannot pass these options on, so
they live in a context variable: other threads run the same modules at the same time.

Among them are the token summaries that novelty reads: one or two per block of the trunk, and one of
the last block's output, averaged over the members. Members that branch at the first block share no
trunk: there the embeddings are summarised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hosts.block_calls import Form
from ..uncertainty.novelty import full_precision

if TYPE_CHECKING:
    from .linear_readout import FeatureCollector


class SummaryCollector:
    """Token summaries of one call.

    Args:
        mask: True or 1 where a token is not padding, `[batch, tokens]`; None without padding.
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
        self._rows: dict[int, Tensor] = {}
        self._ends: list[Tensor] = []

    def take(self, block: int, hidden: Tensor) -> None:
        """Summarise the hidden states `[batch, tokens, width]` after a block of the trunk."""
        if block not in self._rows:  # streams that run one by one share the trunk
            self._rows[block] = self._summarised(_as_tokens(hidden))

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
        if 0 not in self._rows:
            self._rows[0] = self._summarised(_as_tokens(hidden))[:, -1:]

    def leave(self, hidden: Tensor) -> None:
        """Summarise what leaves the last block: the members' streams, folded into the batch.

        A host that runs once per stream comes here once per stream.
        """
        hidden = _as_tokens(hidden)
        mean = hidden.float().unflatten(0, (self._streams, -1)).mean(0)
        if self._weights is not None and mean.shape[1] == self._weights.shape[-1]:
            self._ends.append(self._summarised(mean)[:, 0])
        else:  # readout-only blocks leave the readout token first
            self._ends.append(mean[:, 0].clone())

    def summaries(self) -> Tensor:
        """Return the token summaries, `[batch, tap, width]`, block by block."""
        end = self._ends[0] if len(self._ends) == 1 else torch.stack(self._ends).mean(0)
        return torch.cat([*(self._rows[block] for block in sorted(self._rows)), end[:, None]], 1)


def tap_names(blocks: int, *, readout: bool) -> tuple[str, ...]:
    """Name the taps of a trunk with so many blocks, in the order of the summaries."""
    kinds = ("readout token", "mean token") if readout else ("mean token",)
    trunk = [f"block {block}, {kind}" for block in range(blocks) for kind in kinds]
    return (*(trunk or ["embeddings, mean token"]), "last block, mean of members")


def _as_tokens(hidden: Tensor) -> Tensor:
    """Return states `[batch, y, x, width]`, as Swin has them, as `[batch, tokens, width]`."""
    return hidden.flatten(1, -2) if hidden.dim() > 3 else hidden


@dataclass(frozen=True)
class CallOptions:
    """Options of one call.

    Attributes:
        owner: Whose options they are; any other body ignores them.
        positions: Position of each sample's readout `[batch]`, where it depends on the sample.
        trunk_states: The trunk's output, if known: the trunk is then not run.
        answer: Returned at once, if given: nothing is run.
        streams: Collects the members' streams at full length; the host gets only the first.
        states: Collects the output of every block.
        at_branch: Called with the trunk's output; may raise to stop there.
        summaries: Takes the token summaries that novelty reads.
        features: Takes the features that linear readouts read.
        end: The classifier's stream that this pass of the host runs; None for all, folded.
        memory: Host engine: outputs of blocks by (layer, stream): states, or None where the input
            can be passed on.
    """

    owner: object
    positions: Tensor | None = None
    trunk_states: Tensor | None = None
    answer: Tensor | None = None
    streams: list[Tensor] | None = None
    states: list[Tensor] | None = None
    at_branch: Callable[[Tensor], None] | None = None
    summaries: SummaryCollector | None = None
    features: FeatureCollector | None = None
    end: int | None = None
    memory: dict[tuple[int, int], tuple[Tensor | None, Form]] = field(default_factory=dict)


_current: ContextVar[CallOptions | None] = ContextVar("hydra_call_options", default=None)
_traced: CallOptions | None = None
"""The same while torch.compile traces a call: it knows no context variables, and one thread
traces."""


def _found() -> CallOptions | None:
    if torch.compiler.is_compiling() and _traced is not None:
        return _traced
    return _current.get()


def running_call() -> CallOptions:
    """Return the options of the running call, whoever set them: for parts without an owner."""
    return _found() or CallOptions(None)


def options_of(owner: object) -> CallOptions:
    """Return the options of the running call."""
    options = _found()
    return CallOptions(owner) if options is None or options.owner is not owner else options


@contextmanager
def set_options(owner: object, **changes: Any) -> Iterator[None]:
    """Change options for the calls inside; those of an enclosing call stay as they are."""
    global _traced
    if torch.compiler.is_compiling():
        before, _traced = _traced, replace(options_of(owner), **changes)
        try:
            yield
        finally:
            _traced = before
        return
    token = _current.set(replace(options_of(owner), **changes))
    try:
        yield
    finally:
        _current.reset(token)
