"""The body of a fused model: it stands in the host's list of blocks, alone, and is all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.plan import Plan
from ..hosts.family import Family
from ..hosts.probe import Readout
from .layers import Context, FusedBlock, _select, host_mask, streams_of


@dataclass(frozen=True)
class Call:
    """What one call of a body is told beside the host's arguments (see `Body.told`).

    Attributes:
        positions: Of each sample's readout [batch], where it depends on the sample.
        trunk_states: The trunk's output, known already: the trunk is not run.
        answer: Returned at once: nothing is run.
        streams: Takes the members' streams, each at full length; the host gets the first only.
        states: Takes the output of every block.
        at_branch: Called with the trunk's output; it may raise, to stop there.
    """

    body: nn.Module
    positions: Tensor | None = None
    trunk_states: Tensor | None = None
    answer: Tensor | None = None
    streams: list[Tensor] | None = None
    states: list[Tensor] | None = None
    at_branch: Callable[[Tensor], None] | None = None


# Of the context, not of the module: other threads run the same module at the same time.
_call: ContextVar[Call | None] = ContextVar("hydra_body_call", default=None)


class Body(nn.Module):
    """The trunk (the host's own blocks, pruned) and the branched blocks above it.

    Called by the host like a block; returns the members' streams as a larger batch,
    [streams * batch, tokens, width].
    """

    def __init__(
        self,
        trunk: Sequence[nn.Module],
        branch: Sequence[FusedBlock],
        plan: Plan,
        readout: Readout,
        family: Family,
        causal: bool,
    ) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(trunk)
        self.branch = nn.ModuleList(branch)
        self.plan = plan
        self.readout = readout
        self.family = family
        self.causal = causal

    @contextmanager
    def told(
        self,
        *,
        positions: Tensor | None = None,
        trunk_states: Tensor | None = None,
        answer: Tensor | None = None,
        streams: list[Tensor] | None = None,
        states: list[Tensor] | None = None,
        at_branch: Callable[[Tensor], None] | None = None,
    ) -> Iterator[None]:
        """Tell the calls inside what the host cannot hand over (see `Call`)."""
        now = self._told()
        call = replace(
            now,
            positions=now.positions if positions is None else positions,
            trunk_states=now.trunk_states if trunk_states is None else trunk_states,
            answer=answer,
            streams=streams,
            states=now.states if states is None else states,
            at_branch=at_branch,
        )
        token = _call.set(call)
        try:
            yield
        finally:
            _call.reset(token)

    def _told(self) -> Call:
        call = _call.get()
        return Call(self) if call is None or call.body is not self else call

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run all blocks."""
        call = self._told()
        if call.answer is not None:
            return call.answer
        x = hidden_states if call.trunk_states is None else call.trunk_states
        for block in self.trunk if call.trunk_states is None else ():
            x = block(x, *args, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
            if call.states is not None:
                call.states.append(x)
        if call.at_branch is not None:
            call.at_branch(x)
        if self.branch:
            causal = bool(kwargs.get("is_causal", self.causal))
            context = Context(
                mask=host_mask(args, kwargs, x),
                causal=causal,
                tokens=self.readout.tokens,
                positions=call.positions,
            )
            for block in self.branch:
                x = block(x, context)
                if call.states is not None:
                    call.states.append(x)
        inputs = self.plan.layers[-1].streams if self.plan.layers else 1
        if self.plan.ends != tuple(range(inputs)):
            x = _select(x, self.plan.ends, inputs)
        if call.streams is None:
            return x
        streams = streams_of(x, len(self.plan.ends))
        call.streams.extend(_full_length(s, call.positions, hidden_states) for s in streams)
        return call.streams[0]


def _full_length(stream: Tensor, positions: Tensor | None, hidden_states: Tensor) -> Tensor:
    """Put readout rows back at their places, for a host that looks for them itself."""
    length = hidden_states.shape[1]
    if positions is None or stream.shape[1] == length:
        return stream
    whole = stream.new_zeros(stream.shape[0], length, stream.shape[2])
    whole[torch.arange(len(stream), device=stream.device), positions] = stream[:, 0]
    return whole
