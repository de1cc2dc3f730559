"""The body of a fused model: the only entry of the host's list of blocks; it runs all blocks.

Arguments by layer: what the host passes to each of its blocks, kept for the body.

A host that chooses masks or angles layer by layer calls as many blocks as before. All but the last
are places, which record their arguments and pass the states on; the last is the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..heads.stream_plan import Plan
from ..hosts.arithmetic import Arithmetic
from ..hosts.attention import Grid
from ..hosts.block_arguments import read_arguments
from ..hosts.block_calls import Form, full_length, states_of, take_call, without_cache
from ..hosts.families import Family
from ..hosts.probes import Readout
from .fused_block import Context, FusedBlock
from .streams import select_streams, streams_of

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block, without the states."""

# A context variable, not an attribute: other threads run the same module at the same time.
_handed: ContextVar[tuple[Given, ...]] = ContextVar("hydra_handed", default=())


class Place(nn.Module):
    """Takes the place of a block below the last."""

    def __init__(self, layer: int, form: Form, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer, self.form = layer, form
        show_(self, settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments; pass the states on."""
        call = take_call(args, kwargs)
        _handed.set((*_handed.get()[: self.layer], (call.args, call.kwargs)))
        return self.form.fill(call.hidden)


def take_handed() -> tuple[Given, ...]:
    """Return what the places recorded in this pass, from the first block on."""
    handed = _handed.get()
    _handed.set(())  # keep nothing longer than the pass
    return handed


def plain_settings(block: nn.Module) -> dict[str, Any]:
    """Return the settings of a block that a host may read to choose its arguments."""
    return {
        name: value
        for name, value in vars(block).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_")
    }


def show_(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give a module the settings of the block that it replaces, in place."""
    for name, value in settings.items():
        if not hasattr(module, name):
            setattr(module, name, value)


@dataclass(frozen=True)
class Call:
    """What one call of a body gets in addition to the host's arguments (see `Body.told`).

    Attributes:
        positions: Position of each sample's readout [batch], where it depends on the sample.
        trunk_states: The trunk's output, if known: the trunk is then not run.
        answer: Returned at once, if given: nothing is run.
        streams: Collects the members' streams at full length; the host gets only the first.
        states: Collects the output of every block.
        at_branch: Called with the trunk's output; may raise to stop there.
    """

    body: nn.Module
    positions: Tensor | None = None
    trunk_states: Tensor | None = None
    answer: Tensor | None = None
    streams: list[Tensor] | None = None
    states: list[Tensor] | None = None
    at_branch: Callable[[Tensor], None] | None = None


# A context variable, not an attribute: other threads run the same module at the same time.
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
        *,
        names: Sequence[str],
        causal: bool,
        arithmetic: Arithmetic,
        heads: int | None = None,
        grid: Grid | None = None,
        form: Form | None = None,
    ) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(trunk)
        self.branch = nn.ModuleList(branch)
        self.plan = plan
        self.readout = readout
        self.family = family
        self.causal = causal
        self.names = tuple(names)  # names of the blocks' positional arguments
        self.arithmetic = arithmetic
        self.heads = heads  # heads in the bias that the host passes, if any
        self.grid = grid  # of relative position tables, if any
        self.form = form or Form()  # in which the host expects a block's output

    @property
    def folds(self) -> bool:
        """Whether one pass of the host reads out all streams."""
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
        """Give the calls inside what the host cannot pass on (see `Call`)."""
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
        """Run all blocks; return the output in the form of the host's blocks."""
        return self.form.fill(self._run(hidden_states, args, kwargs))

    def _run(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        call = self._told()
        if call.answer is not None:
            return call.answer
        args = tuple(
            map(without_cache, args)
        )  # drop a decoder's cache before the trunk can fill it
        kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        given: list[Given] = [(args, kwargs)] * self.plan.depth
        if self.arithmetic.by_layer:
            given = [*take_handed(), (args, kwargs)]
        x = hidden_states if call.trunk_states is None else call.trunk_states
        for layer, block in enumerate(self.trunk if call.trunk_states is None else ()):
            x = states_of(block(x, *given[layer][0], **given[layer][1]))[0]
            if call.states is not None:
                call.states.append(x)
        if call.at_branch is not None:
            call.at_branch(x)
        tokens = x  # all tokens of one stream
        context, form = None, None
        for layer, block in enumerate(self.branch, start=len(self.trunk)):
            same = form == self.arithmetic.rotary_of(layer) and not self.arithmetic.by_layer
            if context is None or not same:
                form = self.arithmetic.rotary_of(layer)
                context = self._context(given[layer], tokens, form, call.positions)
            x = block(x, context)
            if call.states is not None:
                call.states.append(x)
        inputs = self.plan.layers[-1].streams if self.plan.layers else 1
        if self.plan.ends != tuple(range(inputs)):
            x = select_streams(x, self.plan.ends, inputs)
        if call.streams is None:
            return x
        streams = streams_of(x, len(self.plan.ends))
        call.streams.extend(full_length(s, call.positions, hidden_states.shape[1]) for s in streams)
        return call.streams[0]

    def _context(
        self, given: Given, x: Tensor, rotary: str | None, positions: Tensor | None
    ) -> Context:
        """Read the arguments that the host passed to a block."""
        try:
            read = read_arguments(
                self.names, *given, x, rotary=rotary, heads=self.heads, grid=self.grid
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f'On these inputs {error}. Fuse with engine="host", which runs the host\'s own '
                "blocks."
            ) from error
        return Context(
            mask=read.mask,
            causal=self.causal if read.causal is None else read.causal,
            tokens=self.readout.tokens,
            positions=positions,
            rotary=read.rotary,
            bias=read.bias,
        )
