"""Counted cost: multiply-adds, parameters, bytes and activations, from shapes and the plan.

A multiply-add is one product and one sum, half of what flop counters report. What comes before and
after the blocks (patch embedding, pooler, classifier) is counted by running the host's own code on
shapes only. Norms, activations and softmax are not counted, as in other counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..heads.head_mask import HeadMask
from ..heads.stream_plan import LayerPlan, Plan, make_plan
from ..hosts import Block, HostModel, host_model
from ..hosts.block_calls import HostView, Inputs, capture_calls, run_around
from ..hosts.head_weights import is_linear
from ..hosts.host_data import batch_for
from ..hosts.operation_count import (
    BlockWeight,
    inputs_of,
    measure,
    multiply_adds,
    on_shapes,
    weigh_blocks,
)
from ..hosts.probes import Readout
from .cost_record import Cost, LayerCost


def cost(model: Any, batch: Any) -> Cost:
    """Count what a host model or an ensemble costs on a batch; only shapes are run.

    Args:
        model: A host model (pruned or not) or a `HydraEnsemble`.
        batch: A batch in the host's form; only its shapes matter.

    Example:
        >>> cost(ensemble, batch).relative_to(cost(model, batch)).multiply_adds
        1.07
    """
    batch = batch_for(model, batch)
    body = getattr(model, "body", None)
    if body is None:
        host = host_model(model)
        if not _formula_fits(host):
            return _measured_cost(host.model, host, host.name, batch)
        outside = _outside(host, batch)
        blocks = [_plain_block(block, outside) for block in host.blocks]
        return _in_total(host.name, host.model, outside, blocks)
    name = f"HydraEnsemble x {model.members}"
    if model.mode == "loop":
        return _loop_cost(model, batch)
    if model.engine == "host":
        return _measured_cost(model, model._view, name, batch)
    outside = _outside(model._view, batch, streams=len(body.plan.ends), readout=body.readout)
    if body.readouts is not None:
        weights = sum(p.numel() for p in body.readouts.parameters() if p.dim() > 1)
        outside = replace(outside, multiply_adds=outside.multiply_adds + outside.batch * weights)
    return _in_total(name, model.host, outside, _fused_blocks(body, outside))


def _formula_fits(host: HostModel) -> bool:
    """Return whether a host's blocks are only attention over all tokens, norms and MLP.

    That is so where our own arithmetic is proven equal to them; windows, say, cost less. Without
    storage nothing can be proven, and the parts must do.
    """
    if any(p.is_meta for p in host.model.parameters()):
        return host.family.fusable and all(
            block.norm1 is not None
            and block.norm2 is not None
            and block.mlp_names
            and not block.has_experts
            and not block.unknown_parameters()
            and block.attention.why_not_taken_apart() is None
            for block in host.blocks
        )
    return host.why_not_fused() is None


def _in_total(name: str, module: nn.Module, outside: _Outside, blocks: list[LayerCost]) -> Cost:
    """Add up the blocks and what comes before and after them."""
    parameters = sum(p.numel() for p in module.parameters())
    stored = {t.data_ptr() or id(t): t for t in module.state_dict(keep_vars=True).values()}.values()
    inside = sum(block.parameters for block in blocks)
    rest = LayerCost("around", outside.multiply_adds, parameters - inside, outside.bytes)
    layers = (rest, *blocks)
    return Cost(
        multiply_adds=sum(layer.multiply_adds for layer in layers),
        parameters=parameters,
        bytes_on_disk=sum(t.numel() * t.element_size() for t in stored),
        activation_bytes=max(layer.activation_bytes for layer in layers),
        layers=layers,
        batch=outside.batch,
        name=name,
    )


def _measured_cost(model: Any, view: HostView, name: str, batch: Any) -> Cost:
    """Count a host, or an ensemble of it, while the host's own blocks run."""

    def run(model: Any, inputs: Inputs) -> Any:
        root = getattr(model, "host", model)
        places = list(root.get_submodule(view.blocks_path).children())
        if root is model:
            return measure(places, lambda: model(*inputs[0], **inputs[1]))
        return measure(places, lambda: model.fused_logits(*inputs))

    measured = on_shapes(model, inputs_of(view.model, batch), run)
    around = measured.total - sum(measured.blocks)
    outside = _Outside.of(around, measured.shape, view.model)
    layers = []
    for index, module in enumerate(view.blocks_list.children()):
        streams = len(getattr(module, "streams", (module,)))
        widest = max((max(p.shape[-2:]) for p in module.parameters() if p.dim() >= 2), default=0)
        rows = outside.batch * outside.tokens * outside.element
        activations = rows * (outside.width * (1 + streams) + 2 * widest)
        parameters = sum(p.numel() for p in module.parameters())
        layers.append(LayerCost(f"block {index}", measured.blocks[index], parameters, activations))
    return _in_total(name, view.model, outside, layers)


class CostModel:
    """Count many plans of one host on one batch shape; the geometry is looked up once.

    Heads of an already pruned host are numbered as it has them now.
    """

    def __init__(self, model: nn.Module | HostModel, batch: Any) -> None:
        self.host = host_model(model)
        self.hosted = self.host.why_not_fused() is not None
        self.geometry: Sequence[_Geometry | _HostedGeometry]
        blocks = self.host.blocks
        last: Tensor | None = None  # hosts of several stages end with states of another shape
        if self.hosted:
            calls = capture_calls(self.host, blocks, inputs_of(self.host.model, batch))
            self.geometry = [_HostedGeometry(weight) for weight in weigh_blocks(blocks, calls)]
            last = calls[-1].output
        else:
            self.geometry = [_Geometry.of(block, self.host.width) for block in blocks]
        self.outside = _outside(self.host, batch, last=last)
        plain = [g.plain(self.outside) for g in self.geometry]
        self.plain = self.outside.multiply_adds + sum(plain)
        readout = self.host.readout
        if self.hosted:  # its blocks run for all tokens
            readout = replace(readout, tokens=None, positions=None)
        two, one = (
            _outside(self.host, batch, streams=streams, readout=readout, last=last)
            for streams in (2, 1)
        )
        self.heads_after = two.multiply_adds - one.multiply_adds  # of one more stream

    def ratio(
        self,
        masks: Sequence[HeadMask],
        *,
        share_trunk: bool = True,
        share_branch: bool = True,
        readout_only: bool = True,
    ) -> float:
        """Return counted multiply-adds of the fused masks divided by those of the plain host."""
        plan = make_plan(
            masks,
            share_trunk=share_trunk,
            share_branch=share_branch,
            readout_only=readout_only and self.reads_few_tokens,
        )
        return self.ratio_of(plan)

    @property
    def reads_few_tokens(self) -> bool:
        """Whether the last block can run for the readout tokens only."""
        readout = self.host.readout
        few = readout.tokens is not None or readout.positions is not None
        return few and not self.hosted

    def ratio_of(self, plan: Plan) -> float:
        """Return counted multiply-adds of a plan divided by those of the plain host."""
        total = self.outside.multiply_adds + (len(plan.ends) - 1) * self.heads_after
        for layer, geometry in enumerate(self.geometry[: plan.trunk]):
            # heads that the host's own blocks need stay, gated off
            keeps = self.host.arithmetic.keeps_heads
            total += geometry.plain(self.outside, None if keeps else plan.trunk_heads[layer])
        for layer_plan in plan.layers:
            geometry = self.geometry[layer_plan.layer]
            total += geometry.fused(layer_plan, self.outside, self.host.readout)
        return total / self.plain


@dataclass(frozen=True)
class _Outside:
    """What comes before and after the blocks, and the shape of the first states."""

    multiply_adds: int
    batch: int
    tokens: int
    width: int
    element: int

    @classmethod
    def of(cls, multiply_adds: int, shape: Sequence[int], model: nn.Module) -> _Outside:
        batch, *grid, width = shape  # [batch, tokens, width] or [batch, y, x, width]
        element = next((p.element_size() for p in model.parameters()), 4)
        return cls(multiply_adds, batch, math.prod(grid), width, element)

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.tokens * self.width * self.element


@dataclass(frozen=True)
class _HostedGeometry:
    """Cost of one of the host's own blocks, by the heads that it keeps."""

    weight: BlockWeight

    def plain(self, outside: _Outside, kept: Sequence[int] | None = None) -> int:
        """Multiply-adds of a block of one stream."""
        return self.weight.whole if kept is None else self.weight.with_heads(kept)

    def rows(self, outside: _Outside) -> int:
        """Tokens of the whole batch that pass the block."""
        return self.weight.rows

    def fused(self, plan: LayerPlan, outside: _Outside, readout: Readout) -> int:
        """Multiply-adds of all streams."""
        return sum(self.weight.with_heads(heads) for heads in plan.heads)


@dataclass(frozen=True)
class _Geometry:
    """The sizes of a block that our own arithmetic runs."""

    width: int
    head_dim: int
    mlp: int  # weights of the MLP's linears
    hidden: int  # its widest layer
    heads: int = 0
    kv_heads: int = 0

    @classmethod
    def of(cls, block: Block, width: int) -> _Geometry:
        site, mlp = block.attention, [block.module.get_submodule(path) for path in block.mlp_names]
        return cls(width, site.head_dim, *_mlp_sizes(mlp), site.num_heads, site.kv_heads)

    def plain(self, outside: _Outside, kept: Sequence[int] | None = None) -> int:
        """Multiply-adds of a block of one stream, all tokens; groups of queries go as a whole."""
        group = max(1, self.heads // max(1, self.kv_heads))
        kv = self.kv_heads if kept is None else len({place // group for place in kept})
        rows, t = self.rows(outside), outside.tokens
        wide = (self.heads if kept is None else kv * group) * self.head_dim
        projections = rows * self.width * (2 * wide + 2 * kv * self.head_dim)
        return projections + 2 * rows * t * wide + rows * self.mlp

    def rows(self, outside: _Outside) -> int:
        """Tokens of the whole batch that pass the block."""
        return outside.batch * outside.tokens

    def fused(self, plan: LayerPlan, outside: _Outside, readout: Readout) -> int:
        """Multiply-adds of a fused block."""
        batch, t = outside.batch, outside.tokens
        queries = _queries(plan, outside, readout)
        total = 0
        for _, heads in plan.groups():
            wide = len(heads) * self.head_dim
            total += batch * self.width * wide * (2 * t + queries)
            total += 2 * batch * queries * t * wide
        for heads in plan.heads:
            total += batch * queries * len(heads) * self.head_dim * self.width
        return total + plan.streams * batch * queries * self.mlp

    def activations(self, groups: int, heads: int, streams: int, queries: int, o: _Outside) -> int:
        """Elements alive at once: the larger of the attention's and the MLP's."""
        rows = o.batch * o.tokens
        attention = (2 * groups * self.width + 3 * heads * self.head_dim) * rows
        attention += o.batch * queries * (heads * self.head_dim + streams * self.width)
        mlp = streams * o.batch * queries * (2 * self.width + 2 * self.hidden)
        return max(attention, mlp) * o.element


def _mlp_sizes(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Return the number of weights of all linears inside the modules, and the widest layer."""
    inside = [m for module in modules for m in module.modules()]
    weights: list[Any] = [m.weight for m in inside if is_linear(m)]
    return sum(w.numel() for w in weights), max((max(w.shape) for w in weights), default=0)


def _queries(plan: LayerPlan, outside: _Outside, readout: Readout) -> int:
    if not plan.readout_only:
        return outside.tokens
    return 1 if readout.positions is not None else (readout.tokens or outside.tokens)


def _plain_block(block: Block, outside: _Outside) -> LayerCost:
    geometry = _Geometry.of(block, outside.width)
    return LayerCost(
        f"block {block.index}",
        geometry.plain(outside),
        sum(p.numel() for p in block.module.parameters()),
        geometry.activations(1, geometry.heads, 1, outside.tokens, outside),
    )


def _fused_blocks(body: Any, outside: _Outside) -> list[LayerCost]:
    layers = [
        _plain_block(Block.of(layer, module, body.family), outside)
        for layer, module in enumerate(body.trunk)
    ]
    for fused in body.branch:
        plan: LayerPlan = fused.bank.plan
        geometry = _Geometry(outside.width, fused.bank.head_dim, *_mlp_sizes(fused.mlp_of(0)))
        groups = plan.groups()
        heads = sum(len(heads) for _, heads in groups)
        queries = _queries(plan, outside, body.readout)
        layers.append(
            LayerCost(
                f"block {plan.layer}",
                geometry.fused(plan, outside, body.readout),
                sum(p.numel() for p in fused.parameters()),
                geometry.activations(len(groups), heads, plan.streams, queries, outside),
            )
        )
    return layers


def _loop_cost(ensemble: Any, batch: Any) -> Cost:
    members = [cost(ensemble.member(m), batch) for m in range(ensemble.members)]
    tensors = {id(p): p for p in ensemble.host.parameters()}.values()
    first = members[0]
    layers = tuple(
        LayerCost(
            layer.name,
            sum(m.layers[i].multiply_adds for m in members),
            layer.parameters,
            max(m.layers[i].activation_bytes for m in members),
        )
        for i, layer in enumerate(first.layers)
    )
    return Cost(
        multiply_adds=sum(m.multiply_adds for m in members),
        parameters=sum(p.numel() for p in tensors),
        bytes_on_disk=sum(p.numel() * p.element_size() for p in tensors),
        activation_bytes=max(m.activation_bytes for m in members),
        layers=layers,
        batch=first.batch,
        name=f"HydraEnsemble x {ensemble.members}, one by one",
    )


def _outside(
    host: HostView,
    batch: Any,
    *,
    streams: int = 1,
    readout: Readout | None = None,
    last: Tensor | None = None,
) -> _Outside:
    """Count what the host runs before and after its blocks; `last` are the states after them."""
    shapes: list[tuple[int, ...]] = []
    folds = readout is None or readout.folds
    forms = host.forms  # probed by a pass through the host, which must not be counted below

    def answer(hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        tokens = None if readout is None else readout.tokens
        hidden = hidden if last is None else last.to(hidden.device)
        x = hidden[:, :tokens]
        return x.repeat(streams, *[1] * (x.dim() - 1)) if folds else hidden

    def run(model: nn.Module, inputs: Inputs) -> int:
        view = HostView(model, host.family, host.blocks_path, forms)
        return multiply_adds(lambda: run_around(view, inputs, answer))

    counted = on_shapes(host.model, inputs_of(host.model, batch), run)
    return _Outside.of(counted if folds else counted * streams, shapes[-1], host.model)
