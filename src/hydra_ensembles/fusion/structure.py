"""Give a host the structure of a fused model: a body instead of its blocks.

The structure follows from the plan and from how many copies each part has; the weights are filled
in afterwards, by `assemble` from members or by `from_pretrained` from a file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..heads.stream_plan import LayerPlan, Plan
from ..hosts import Block, HostModel
from ..hosts.block_calls import parameter_names
from ..hosts.head_removal import Cut, whole_groups
from ..hosts.head_weights import HeadWeights
from .body import Body, PlaceholderBlock, copy_settings_, plain_settings
from .fused_block import FusedBlock
from .head_bank import HeadBank
from .host_engine import HostedBody
from .linear_readout import Readouts, tap_, tap_neurons_
from .streams import OutputBias, PerEnd, PerStream

Copies = Mapping[str, int]
"""Number of copies per part that differs between streams; all other parts have one."""


def build_body_(host: HostModel, plan: Plan, copies: Copies) -> tuple[Body, tuple[nn.Module, ...]]:
    """Replace a host's blocks by a body, in place.

    Returns:
        The body, and templates of the branched blocks: the host's own, with their parameters on
        the meta device, from which `member_model` makes a member's blocks.
    """
    readout = host.readout
    trunk = []
    for layer in range(plan.trunk):
        block = host.blocks[layer]
        now = host.original_mask
        kept = list(plan.trunk_heads[layer])
        if now is not None:  # an already pruned host: heads by their place among the remaining ones
            remaining = now.indices(layer)
            kept = [remaining.index(head) for head in kept]
        if len(kept) != block.attention.num_heads:
            everything = tuple(range(block.attention.num_heads))
            keeps = host.arithmetic.keeps_heads
            cut = Cut(everything, tuple(kept)) if keeps else whole_groups(block, kept)
            cut.apply_(block)
        trunk.append(block.module)
    branch = [
        fused_block(
            host.blocks[p.layer],
            p,
            copies,
            _places(plan, p) if host.arithmetic.keeps_heads else (),
        )
        for p in plan.layers
    ]
    block_templates = tuple(_block_template(host.blocks[p.layer].module) for p in plan.layers)
    last = host.blocks[-1]
    places = []
    if host.arithmetic.by_layer:
        places = [
            PlaceholderBlock(layer, form, plain_settings(block.module))
            for layer, (block, form) in enumerate(zip(host.blocks[:-1], host.forms, strict=False))
        ]
    body = Body(
        trunk,
        branch,
        plan,
        readout,
        host.family,
        names=parameter_names(last.module)[1:],
        causal=last.attention.causal,
        arithmetic=host.arithmetic,
        heads=last.attention.num_heads if host.arithmetic.biased else None,
        grid=last.attention.grid,
        form=host.forms[-1],
    )
    copy_settings_(body, plain_settings(last.module))  # a host may read them (`attention_type`)
    host.replace_blocks_([*places, body])
    return body, block_templates


def _block_template(block: nn.Module) -> nn.Module:
    """Copy a block without its parameters' storage; keep its buffers (an index, for example)."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in block.buffers()}
    for parameter in block.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    return copy.deepcopy(block, memo)


def _places(plan: Plan, layer: LayerPlan) -> tuple[int, ...]:
    """Return the place in the host of every head of a layer's bank."""
    places: dict[int, int] = {}
    for member, heads in zip(layer.members, layer.heads, strict=True):
        places.update(zip(heads, plan.masks[member].indices(layer.layer), strict=True))
    return tuple(places[head] for head in range(len(places)))


def fused_block(
    block: Block, plan: LayerPlan, copies: Copies, places: Sequence[int] = ()
) -> FusedBlock:
    """Make the fused form of one block from copies of its parts."""
    get = block.module.get_submodule
    site = block.attention

    def parts(name: str, module: nn.Module | None) -> PerStream:
        assert module is not None
        count = copies.get(f"{plan.layer}.{name}", 1)
        return PerStream([copy.deepcopy(module) for _ in range(count)])

    def line(name: str, paths: tuple[str, ...]) -> list[PerStream]:
        modules = [(i, block.part(path)) for i, path in enumerate(block.names(paths))]
        return [parts(f"{name}.{i}", part) for i, part in modules if not _identity(part)]

    def mlp(place: int, path: str) -> nn.Module:
        name = f"mlp.{place}"  # one copy per stream only where members own their MLPs
        if f"{plan.layer}.{name}" in copies:
            return parts(name, get(path))
        module, prefix = copy.deepcopy(get(path)), f"{plan.layer}.{name}."
        for full in copies:  # or only a layer inside it
            if full.startswith(prefix):
                inner = full.removeprefix(prefix)
                module.set_submodule(inner, parts(f"{name}.{inner}", module.get_submodule(inner)))
        return module

    query_norm, key_norm = site.head_norms
    bias = site.output_bias
    count = copies.get(f"{plan.layer}.output_bias", 1)
    return FusedBlock(
        HeadBank(_room_for(site.weights(), plan), plan),
        OutputBias(None if bias is None else bias[None].repeat(count, 1)),
        norm=block.family.norm,
        norm1=parts("norm1", block.norm1),
        norm2=parts("norm2", block.norm2),
        mlp=[mlp(i, path) for i, path in enumerate(block.mlp_names)],
        after_attention=line("after_attention", block.family.after_attention),
        after_mlp=line("after_mlp", block.family.after_mlp),
        query_norm=None if query_norm is None else parts("query_norm", query_norm),
        key_norm=None if key_norm is None else parts("key_norm", key_norm),
        scale=site.scale,
        dropout=site.dropout,
        softcap=site.softcap,
        places=places,
        index=None if site.table is None else site.table.index,
    )


def _identity(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity)


def _room_for(weights: HeadWeights, plan: LayerPlan) -> HeadWeights:
    """Allocate tensors for the plan's distinct heads (filled in later)."""
    heads = max((h for kept in plan.heads for h in kept), default=-1) + 1

    def room(like: torch.Tensor | None) -> torch.Tensor | None:
        return None if like is None else like.new_zeros(heads, *like.shape[1:])

    return HeadWeights(*(room(getattr(weights, name)) for name in HeadWeights.__dataclass_fields__))  # type: ignore[arg-type]


def attach_readouts_(body: Body | HostedBody, readouts: Readouts, template: nn.Module) -> None:
    """Give a body linear readouts, which read its last block, in place.

    Args:
        body: A body whose last block is branched (one stream is enough).
        readouts: The readouts; they replace others of the same block.
        template: The host's last block, with or without storage.
    """
    if body.readouts is None:
        last = body.plan.depth - 1
        if isinstance(body, HostedBody):
            tap_(Block.of(last, body.layers[-1].streams[0], body.family), readouts.second)
        else:
            paths = Block.of(last, template, body.family).mlp_names
            tap_neurons_(list(body.branch[-1].mlp), paths, readouts.second)  # type: ignore[arg-type]
    body.readouts = readouts.train(body.branch[-1].training)  # new modules are in training mode


def split_classifier_(model: nn.Module, copies: Copies, *, folds: bool = True) -> None:
    """Give modules after the blocks that differ between members one copy per stream, in place.

    Args:
        model: The host.
        copies: Number of copies by name.
        folds: Whether one pass of the host reads out all streams; otherwise it runs once for each.
    """
    kind = PerStream if folds else PerEnd
    for name, count in copies.items():
        if name.startswith("classifier."):
            path = name.removeprefix("classifier.")
            parent, _, leaf = path.rpartition(".")
            module = model.get_submodule(path)
            setattr(
                model.get_submodule(parent),
                leaf,
                kind([copy.deepcopy(module) for _ in range(count)]),
            )
