"""Counted cost: multiply-adds, parameters, bytes and activations, from shapes and the plan.

A multiply-add is one product and one sum, half of what flop counters report. What comes before and
after the blocks (patch embedding, pooler, classifier) is counted by running the host's own code on
shapes only. Norms, activations and softmax are not counted, as in other counters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import move, split_batch
from ..errors import DataError
from ..heads.head_mask import HeadMask
from ..heads.stream_plan import LayerPlan, Plan, make_plan
from ..hosts import Block, HostModel, host_model
from ..hosts.block import is_linear
from ..hosts.block_calls import run_around
from ..hosts.operation_count import operation_counter
from ..hosts.probes import Readout
from .cost_record import Cost, LayerCost
from .measured_cost import HostedGeometry, formula_fits, hosted_geometry, measure, widest


def cost(model: Any, batch: Any) -> Cost:
    """Count what a host model or an ensemble costs on a batch; only shapes are run.

    Args:
        model: A host model (pruned or not) or a `HydraEnsemble`.
        batch: A batch in the host's form; only its shapes matter.
    """
    body = getattr(model, "body", None)
    if body is None:
        host = host_model(model)
        if not formula_fits(host):
            return _measured_cost(host.model, host.model, host.blocks_path, host.name, batch)
        outside = _outside(host, batch)
        blocks = [_plain_block(host, layer, outside) for layer in range(len(host))]
        module, name = host.model, host.name
    else:
        host = model._view
        if model.mode == "loop":
            return _loop_cost(model, batch)
        if model.engine == "host":
            name = f"HydraEnsemble x {model.members}"
            return _measured_cost(model, model.host, host.blocks_path, name, batch)
        outside = _outside(host, batch, streams=len(body.plan.ends), readout=body.readout)
        blocks = _fused_blocks(body, outside)
        module, name = model.host, f"HydraEnsemble x {model.members}"
    parameters = sum(p.numel() for p in module.parameters())
    stored = {id(t): t for t in module.state_dict(keep_vars=True).values()}.values()
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


def _measured_cost(model: Any, root: nn.Module, path: str, name: str, batch: Any) -> Cost:
    """Count the cost of a model while the host's own blocks run."""
    measured = measure(model, root, path, batch)
    size, tokens, width = measured.shape
    element = next((p.element_size() for p in root.parameters()), 4)
    rows = size * tokens * element
    layers = []
    for index, module in enumerate(root.get_submodule(path).children()):
        streams = len(getattr(module, "streams", (module,)))
        parameters = sum(p.numel() for p in module.parameters())
        activations = rows * (width * (1 + streams) + 2 * widest(module))
        layers.append(LayerCost(f"block {index}", measured.blocks[index], parameters, activations))
    parameters = sum(p.numel() for p in root.parameters())
    stored = {t.data_ptr() or id(t): t for t in root.state_dict(keep_vars=True).values()}.values()
    rest = LayerCost(
        "around",
        measured.total - sum(measured.blocks),
        parameters - sum(layer.parameters for layer in layers),
        2 * rows * width,
    )
    return Cost(
        multiply_adds=measured.total,
        parameters=parameters,
        bytes_on_disk=sum(t.numel() * t.element_size() for t in stored),
        activation_bytes=max(layer.activation_bytes for layer in (rest, *layers)),
        layers=(rest, *layers),
        batch=size,
        name=name,
    )


class CostModel:
    """Count many plans of one host on one batch shape; the geometry is looked up once."""

    def __init__(self, model: nn.Module | HostModel, batch: Any) -> None:
        self.host = host_model(model)
        self.hosted = self.host.why_not_fused() is not None
        self.geometry: Sequence[_Geometry | HostedGeometry]
        last: Tensor | None = None  # hosts of several stages end with states of another shape
        if self.hosted:
            self.geometry, last = hosted_geometry(self.host, batch)
        else:
            self.geometry = [_Geometry.of(self.host, layer) for layer in range(len(self.host))]
        self.outside = _outside(self.host, batch, last=last)
        plain = [g.plain(self.outside) for g in self.geometry]
        self.plain = self.outside.multiply_adds + sum(plain)
        readout = self.host.readout
        if self.hosted:  # its blocks run for all tokens
            readout = replace(readout, tokens=None, positions=None)
        self.heads_after = _head_multiply_adds(self.host, batch, readout, last)

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
            heads = None if keeps else self._places(layer, plan.trunk_heads[layer])
            total += geometry.plain(self.outside, heads)
        for layer_plan in plan.layers:
            geometry = self.geometry[layer_plan.layer]
            total += geometry.fused(layer_plan, self.outside, self.host.readout)
        return total / self.plain

    def _places(self, layer: int, heads: Sequence[int]) -> Sequence[int]:
        """Return heads by their place among those that are left in an already pruned host."""
        now = self.host.original_mask
        there = None if now is None else now.indices(layer)
        return heads if there is None else [there.index(head) for head in heads]


@dataclass(frozen=True)
class _Outside:
    """What comes before and after the blocks, and the shape of the first states."""

    multiply_adds: int
    batch: int
    tokens: int
    width: int
    element: int

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.tokens * self.width * self.element


@dataclass(frozen=True)
class _Geometry:
    width: int
    head_dim: int
    heads: int
    kv_heads: int
    mlp: int  # weights of the MLP's linears
    hidden: int  # its widest layer

    @classmethod
    def of(cls, host: HostModel, layer: int) -> _Geometry:
        block = host.blocks[layer]
        weights = _linear_weights([block.module.get_submodule(path) for path in block.mlp_names])
        return cls(
            width=host.width,
            head_dim=block.attention.head_dim,
            heads=block.attention.num_heads,
            kv_heads=block.attention.kv_heads,
            mlp=sum(w.numel() for w in weights),
            hidden=max((max(w.shape) for w in weights), default=0),
        )

    def plain(self, outside: _Outside, kept: Sequence[int] | None = None) -> int:
        """Multiply-adds of a block of one stream, all tokens; groups of queries go as a whole."""
        group = max(1, self.heads // max(1, self.kv_heads))
        kv = self.kv_heads if kept is None else len({place // group for place in kept})
        rows, t = outside.batch * outside.tokens, outside.tokens
        wide = (self.heads if kept is None else kv * group) * self.head_dim
        projections = rows * self.width * (2 * wide + 2 * kv * self.head_dim)
        return projections + 2 * rows * t * wide + rows * self.mlp

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


def _linear_weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weights of all linear layers inside the modules."""
    inside = [m for module in modules for m in module.modules()]
    weights: list[Any] = [m.weight for m in inside if is_linear(m)]
    return weights


def _queries(plan: LayerPlan, outside: _Outside, readout: Readout) -> int:
    if not plan.readout_only:
        return outside.tokens
    return 1 if readout.positions is not None else (readout.tokens or outside.tokens)


def _plain_block(host: HostModel, layer: int, outside: _Outside) -> LayerCost:
    geometry = _Geometry.of(host, layer)
    return LayerCost(
        f"block {layer}",
        geometry.plain(outside),
        sum(p.numel() for p in host.blocks[layer].module.parameters()),
        geometry.activations(1, geometry.heads, 1, outside.tokens, outside),
    )


def _fused_blocks(body: Any, outside: _Outside) -> list[LayerCost]:
    layers = []
    plan: Plan = body.plan
    family = body.family
    for layer, module in enumerate(body.trunk):
        block = Block.of(layer, module, family)
        holder = _OneBlock(block, outside.width)
        layers.append(_plain_block(holder, 0, outside))  # type: ignore[arg-type]
        layers[-1] = LayerCost(f"block {layer}", *list(layers[-1].__dict__.values())[1:])
    for fused, layer_plan in zip(body.branch, plan.layers, strict=True):
        layer_plan = fused.bank.plan
        weights = _linear_weights(fused.mlp_of(0))
        geometry = _Geometry(
            outside.width,
            fused.bank.head_dim,
            0,
            0,
            sum(w.numel() for w in weights),
            max((max(w.shape) for w in weights), default=0),
        )
        queries = _queries(layer_plan, outside, body.readout)
        groups = layer_plan.groups()
        layers.append(
            LayerCost(
                f"block {layer_plan.layer}",
                geometry.fused(layer_plan, outside, body.readout),
                sum(p.numel() for p in fused.parameters()),
                geometry.activations(
                    len(groups),
                    sum(len(heads) for _, heads in groups),
                    layer_plan.streams,
                    queries,
                    outside,
                ),
            )
        )
    return layers


class _OneBlock:
    """The part of a HostModel that counting one block needs."""

    def __init__(self, block: Any, width: int) -> None:
        self.blocks = [block]
        self.width = width


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
    host: HostModel,
    batch: Any,
    *,
    streams: int = 1,
    readout: Readout | None = None,
    last: Tensor | None = None,
) -> _Outside:
    """Count what the host runs before and after its blocks, on shapes only.

    Args:
        host: The host.
        batch: A batch.
        streams: Number of streams after the blocks.
        readout: Which tokens are read; None for all.
        last: The states after the last block; by default they are like those before the first.
    """
    args, kwargs, _ = split_batch(batch)
    shapes: list[tuple[int, ...]] = []
    assert host.forms is not None  # looked up before anything is counted
    folds = readout is None or readout.folds

    def answer(hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        tokens = None if readout is None else readout.tokens
        hidden = hidden if last is None else last.to(hidden.device)
        x = hidden[:, :tokens]
        return x.repeat(streams, *[1] * (x.dim() - 1)) if folds else hidden

    _ = host.forms  # probed by a pass through the host, which must not be counted below
    counted = 0
    element = next((p.element_size() for p in host.model.parameters()), 4)
    for model, where in ((_on_meta, "meta"), (_as_is, None)):
        shapes.clear()
        try:
            twin = model(host)
            counter = operation_counter()
            with torch.no_grad(), counter:
                run_around(twin, (move(args, where), move(kwargs, where)), answer)
            counted = counter.get_total_flops() // 2
            break
        except Exception as error:  # code that reads values cannot run on shapes: run it
            if where is None:
                raise DataError(
                    f"{host.name} cannot be run on this batch ({type(error).__name__}: {error}). "
                    "Pass a batch in the form that the model takes."
                ) from error
    if not folds:
        counted *= streams
    batch, *grid, width = shapes[0]  # states are [batch, tokens, width] or [batch, y, x, width]
    return _Outside(counted, batch, math.prod(grid), width, element)


def _head_multiply_adds(host: HostModel, batch: Any, readout: Readout, last: Tensor | None) -> int:
    """Count the cost of one more stream after the blocks."""
    two = _outside(host, batch, streams=2, readout=readout, last=last)
    one = _outside(host, batch, streams=1, readout=readout, last=last)
    return two.multiply_adds - one.multiply_adds


def _on_meta(host: HostModel) -> HostModel:
    """Copy a host's structure with tensors that have shapes but no storage."""
    memo: dict[int, Any] = {}
    for parameter in host.model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    for buffer in host.model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    twin = HostModel.__new__(HostModel)
    twin.__dict__.update(host.__dict__)
    twin.model = copy.deepcopy(host.model, memo)
    return twin


def _as_is(host: HostModel) -> HostModel:
    return host
