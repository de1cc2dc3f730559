"""The host engine: every stream runs the host's own block where the host calls it.

The host's loop over its blocks stays as it is and passes every block its own arguments (masks by
layer type, rotary positions, shared biases). Streams are folded into the batch where the host's
other code allows it; otherwise the host runs once per stream, and shared blocks are cached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.stream_plan import LayerPlan, Plan
from ..hosts.block import Block
from ..hosts.block_calls import BlockCall, Form, states_of, take_call
from ..hosts.families import Family
from ..hosts.probes import Readout
from .call_options import CallOptions, options_of, set_options
from .linear_readout import Readouts
from .streams import select_streams, streams_of


@dataclass
class Hosting:
    """What all blocks of a hosted ensemble share.

    Attributes:
        plan: Which streams run where.
        readout: Which tokens the classifier reads.
        family: Where the parts of a block are.
        folds: Whether streams are folded into the batch and run in one pass of the host.
    """

    plan: Plan
    readout: Readout
    family: Family
    folds: bool


class HostedBlock(nn.Module):
    """One of the host's blocks for all streams that run it; exposes the block's attributes."""

    def __init__(self, streams: Sequence[nn.Module], layer: LayerPlan, hosting: Hosting) -> None:
        super().__init__()
        self.streams = nn.ModuleList(streams)
        self.plan = layer
        self.hosting = hosting
        self.form: Form | None = None  # form of the block's output, once seen
        self.readouts: Readouts | None = None  # of the last block, as in `Body`

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if name.startswith("__") or not modules.get("streams"):
                raise
            return getattr(modules["streams"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the streams of this pass, each through the host's own block."""
        options = options_of(self.hosting)
        call = take_call(args, kwargs)
        plan, layer = self.hosting.plan, self.plan.layer
        x = call.hidden
        if layer < plan.trunk and options.trunk_states is not None and self._can_skip():
            assert self.form is not None
            return self.form.fill(options.trunk_states if layer == plan.trunk - 1 else x)
        if layer == plan.trunk and options.at_branch is not None:
            options.at_branch(x)
        states, form = self._run(call) if options.end is None else self._run_one(call, options)
        if options.summaries is not None:
            if layer == plan.trunk == 0:
                options.summaries.enter(x)
            if layer < plan.trunk:
                options.summaries.take(layer, states)
            if layer == plan.depth - 1:
                options.summaries.leave(states)
        return form.fill(states)

    def _run(self, call: BlockCall) -> tuple[Tensor, Form]:
        """Run all streams, folded into the batch."""
        plan, collected = self.hosting.plan, options_of(self.hosting).states
        inputs = streams_of(call.hidden, self.plan.inputs)
        outputs = [
            states_of(call.call(block, inputs[parent]))
            for block, parent in zip(self.streams, self.plan.parents, strict=True)
        ]
        form = self._seen(outputs[0][1])
        states = torch.cat([states for states, _ in outputs]) if len(outputs) > 1 else outputs[0][0]
        if collected is not None:
            collected.append(states)
        if self.plan.layer == plan.depth - 1 and plan.ends != tuple(range(len(outputs))):
            states = select_streams(states, plan.ends, len(outputs))
        return states, form

    def _run_one(self, call: BlockCall, options: CallOptions) -> tuple[Tensor, Form]:
        """Run the stream that leads to the call's end; keep it for the other ends."""
        plan, layer = self.hosting.plan, self.plan.layer
        assert options.end is not None
        stream = plan.stream_at(layer, plan.ends[options.end])
        if (layer, stream) in options.memory:
            remembered, form = options.memory[layer, stream]
            return (call.hidden if remembered is None else remembered), form
        states, form = states_of(call.call(self.streams[stream]))
        self._seen(form)
        # of the trunk, only the last output is read again
        options.memory[layer, stream] = (None if layer < plan.trunk - 1 else states, form)
        return states, form

    def _seen(self, form: Form) -> Form:
        if self.form is None and not torch.compiler.is_compiling():
            self.form = form
        return form

    def _can_skip(self) -> bool:
        return self.form is not None and not self.form.hands_on

    def untie_(self, *, mlps: bool = False) -> None:
        """Give every stream its own attention and norms; with `mlps`, all other parts too."""
        taken: set[int] = set()
        for block in self.streams:
            owned = _own_parts(block, self.plan.layer, self.hosting.family)
            for module in block.modules() if mlps else owned:
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if id(parameter) in taken:
                        copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                        setattr(module, name, copied)
            taken |= {id(p) for p in block.parameters()}

    def packed_bytes(self) -> int:
        """Bytes of packed copies: none."""
        return 0


def _own_parts(block: nn.Module, layer: int, family: Family) -> list[nn.Module]:
    """Return the modules that members may own: the attention's, and every norm and scale."""
    view = Block.of(layer, block, family)
    mlp = {id(m) for path in view.mlp_names for m in block.get_submodule(path).modules()}
    attention = [*view.attention.module.modules(), *view.attention.output.modules()]
    attention = [module for module in attention if id(module) not in mlp]
    norms = [
        module
        for module in block.modules()
        if id(module) not in mlp
        and not any(True for _ in module.children())
        and all(p.dim() <= 1 for p in module.parameters())
    ]
    return list({id(module): module for module in [*attention, *norms]}.values())


class HostedBody:
    """All hosted blocks of an ensemble, with the interface of `Body`."""

    def __init__(self, layers: Sequence[HostedBlock]) -> None:
        self.layers = list(layers)
        self.hosting: Hosting = layers[0].hosting

    @property
    def plan(self) -> Plan:
        """Which streams run where."""
        return self.hosting.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.hosting.plan = plan

    @property
    def readout(self) -> Readout:
        """Which tokens the classifier reads."""
        return self.hosting.readout

    @property
    def folds(self) -> bool:
        """Whether one pass of the host runs all streams."""
        return self.hosting.folds

    @property
    def family(self) -> Family:
        """Where the parts of a block are."""
        return self.hosting.family

    @property
    def trunk(self) -> list[HostedBlock]:
        """The blocks that run once for all members."""
        return self.layers[: self.plan.trunk]

    @property
    def branch(self) -> list[HostedBlock]:
        """The blocks above the trunk."""
        return self.layers[self.plan.trunk :]

    @property
    def readouts(self) -> Readouts | None:
        """Logits that are linear in the last block's features, or None."""
        return self.layers[-1].readouts

    @readouts.setter
    def readouts(self, readouts: Readouts | None) -> None:
        self.layers[-1].readouts = readouts

    def options(self, **changes: Any) -> AbstractContextManager[None]:
        """Set options of the calls inside (see `CallOptions`)."""
        return set_options(self.hosting, **changes)

    def each_stream(self, run: Callable[[], Any], positions: Tensor | None = None) -> list[Any]:
        """Call the host once per stream of the classifier; shared blocks run only once."""
        memory: dict[tuple[int, int], tuple[Tensor | None, Form]] = {}
        outputs = []
        for end in range(len(self.plan.ends)):
            with self.options(end=end, memory=memory):
                outputs.append(run())
        return outputs

    def stream(self, layer: int, stream: int) -> nn.Module:
        """Return the host's block of a stream in a layer; it shares its parameters."""
        block = self.layers[layer].streams[stream]
        memo = {id(t): t for t in (*block.parameters(), *block.buffers())}
        return copy.deepcopy(block, memo)
