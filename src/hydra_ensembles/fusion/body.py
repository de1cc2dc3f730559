"""The body of a fused model: the only entry of the host's list of blocks; it runs all blocks.

A host that chooses masks or angles layer by layer calls as many blocks as before. All but the last
are placeholders, which record their arguments and pass the states on; the last is the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
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
from .call_options import CallOptions, options_of, set_options
from .fused_block import Context, FusedBlock
from .linear_readout import Readouts
from .streams import select_streams, streams_of

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block, without the states."""

# A context variable, not an attribute: other threads run the same module at the same time.
_arguments: ContextVar[tuple[Given, ...]] = ContextVar("hydra_arguments", default=())


class PlaceholderBlock(nn.Module):
    """Stands for a block below the last and records its arguments."""

    def __init__(self, layer: int, form: Form, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer, self.form = layer, form
        copy_settings_(self, settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments; pass the states on."""
        call = take_call(args, kwargs)
        _arguments.set((*_arguments.get()[: self.layer], (call.args, call.kwargs)))
        return self.form.fill(call.hidden)


def pop_arguments() -> tuple[Given, ...]:
    """Return what the places recorded in this pass, from the first block on."""
    handed = _arguments.get()
    _arguments.set(())  # keep nothing longer than the pass
    return handed


def plain_settings(block: nn.Module) -> dict[str, Any]:
    """Return the settings of a block that a host may read to choose its arguments."""
    return {
        name: value
        for name, value in vars(block).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_")
    }


def copy_settings_(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give a module the settings of the block that it replaces, in place."""
    for name, value in settings.items():
        if not hasattr(module, name):
            setattr(module, name, value)


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
        self._rotary = [arithmetic.rotary_of(layer) for layer in range(plan.depth)]
        self.heads = heads  # heads in the bias that the host passes, if any
        self.grid = grid  # of relative position tables, if any
        self.form = form or Form()  # in which the host expects a block's output
        self.readouts: Readouts | None = None  # logits that are linear in the last block's features

    @property
    def folds(self) -> bool:
        """Whether one pass of the host reads out all streams."""
        return self.readout.folds

    def options(self, **changes: Any) -> AbstractContextManager[None]:
        """Set options of the calls inside (see `CallOptions`)."""
        return set_options(self, **changes)

    def each_stream(self, run: Callable[[], Any], positions: Tensor | None) -> list[Any]:
        """Call the host once per stream: all blocks run in the first call, none in the others."""
        streams: list[Tensor] = []
        with self.options(positions=positions, streams=streams, end=0):
            outputs = [run()]
        for end, stream in enumerate(streams[1:], 1):
            with self.options(answer=stream, end=end):
                outputs.append(run())
        return outputs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks; return the output in the form of the host's blocks."""
        return self.form.fill(self._run(hidden_states, args, kwargs))

    def _run(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        call = options_of(self)
        if call.answer is not None:
            return call.answer
        args = tuple(
            map(without_cache, args)
        )  # drop a decoder's cache before the trunk can fill it
        kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        given: list[Given] = [(args, kwargs)] * len(self._rotary)
        if self.arithmetic.by_layer:
            given = [*pop_arguments(), (args, kwargs)]
        x = hidden_states if call.trunk_states is None else call.trunk_states
        summaries = call.summaries
        if summaries is not None and not self.trunk:
            summaries.enter(x)
        for layer, block in enumerate(self.trunk if call.trunk_states is None else ()):
            x = states_of(block(x, *given[layer][0], **given[layer][1]))[0]
            if call.states is not None:
                call.states.append(x)
            if summaries is not None:
                summaries.take(layer, x)
        if call.at_branch is not None:
            call.at_branch(x)
        tokens = x  # all tokens of one stream
        context, form = None, None
        for layer, block in enumerate(self.branch, start=len(self.trunk)):
            if context is None or form != self._rotary[layer] or self.arithmetic.by_layer:
                form = self._rotary[layer]
                context = self._context(given[layer], tokens, form, call)
            x = block(x, context)
            if call.states is not None:
                call.states.append(x)
        inputs = len(self.plan.layers[-1].parents) if self.plan.layers else 1
        if self.plan.ends != tuple(range(inputs)):
            x = select_streams(x, self.plan.ends, inputs)
        if call.streams is not None:
            length = hidden_states.shape[1]
            for stream in streams_of(x, len(self.plan.ends)):
                call.streams.append(full_length(stream, call.positions, length))
        leaving = [x] if call.streams is None else call.streams
        if summaries is not None:
            for states in leaving:
                summaries.leave(states)
        return leaving[0]

    def _context(self, given: Given, x: Tensor, rotary: str | None, call: CallOptions) -> Context:
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
            positions=call.positions,
            rotary=read.rotary,
            bias=read.bias,
            features=call.features,
        )
