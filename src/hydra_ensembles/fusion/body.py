"""The body of a fused model: it stands in the host's list of blocks, alone, and is all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..heads.plan import Plan
from ..hosts.arguments import understand
from ..hosts.calling import Form, full_length, states_of, without_cache
from ..hosts.family import Family
from ..hosts.probe import Readout
from .layers import Context, FusedBlock, _select, streams_of


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
        names: Sequence[str] = (),
        rotary: str | None = None,
        biased: int | None = None,
        form: Form | None = None,
    ) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(trunk)
        self.branch = nn.ModuleList(branch)
        self.plan = plan
        self.readout = readout
        self.family = family
        self.causal = causal
        self.names = tuple(names)  # what the host's blocks call their positional arguments
        self.rotary = rotary  # the form of its rotary positions, if it has any
        self.biased = biased  # the number of heads in the bias that it hands over, if it does
        self.form = form or Form()  # in which the host expects a block's answer

    @property
    def folds(self) -> bool:
        """Whether one pass of the host reads all streams out."""
        return self.readout.folds

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

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks; answer in the form in which the host's blocks do."""
        return self.form.fill(self._run(hidden_states, args, kwargs))

    def _run(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        call = self._told()
        if call.answer is not None:
            return call.answer
        args = tuple(map(without_cache, args))  # a decoder's cache, before the trunk can fill it
        kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        x = hidden_states if call.trunk_states is None else call.trunk_states
        for block in self.trunk if call.trunk_states is None else ():
            x = states_of(block(x, *args, **kwargs))[0]
            if call.states is not None:
                call.states.append(x)
        if call.at_branch is not None:
            call.at_branch(x)
        if self.branch:
            try:
                read = understand(
                    self.names, args, kwargs, x, rotary=self.rotary, heads=self.biased
                )
            except UnsupportedModelError as error:
                raise UnsupportedModelError(
                    f'On these inputs {error}. Fuse with engine="host", which runs the host\'s own '
                    "blocks."
                ) from error
            context = Context(
                mask=read.mask,
                causal=self.causal if read.causal is None else read.causal,
                tokens=self.readout.tokens,
                positions=call.positions,
                rotary=read.rotary,
                bias=read.bias,
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
        call.streams.extend(full_length(s, call.positions, hidden_states.shape[1]) for s in streams)
        return call.streams[0]
