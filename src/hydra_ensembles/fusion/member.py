"""Take one member out of a fused model: a plain host again, physically pruned."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ..data.eval_mode import twin
from ..heads.stream_plan import LayerPlan
from ..hosts import Block
from ..hosts.attention_site import AttentionSite
from ..hosts.block import Scale
from ..hosts.block_calls import HostView
from ..hosts.families import Family
from ..hosts.mlp_site import grow_neurons_
from .body import Body
from .fused_block import FusedBlock
from .host_engine import HostedBody
from .streams import PerStream


def share_parameters(model: nn.Module) -> nn.Module:
    """Copy a module's structure; parameters and buffers stay the same tensors."""
    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def member_model(
    model: nn.Module,
    body: Body | HostedBody,
    block_templates: Sequence[nn.Module],
    host: HostView,
    member: int,
) -> nn.Module:
    """Return one member as a plain host model that shares every parameter it can.

    Args:
        model: The fused host, whose list of blocks holds the body.
        body: That body.
        block_templates: The branched blocks without storage (see `structure.build_body_`).
        host: A view of the host from before the fusion: its family and the blocks' path.
        member: Number of the member.
    """
    plan = body.plan
    places = [plan.stream_of(layer, member) for layer in range(plan.depth)]
    if isinstance(body, HostedBody):
        blocks = [body.stream(layer, place) for layer, place in enumerate(places)]
    else:
        blocks = [share_parameters(block) for block in body.trunk]
        for fused, template, layer in zip(body.branch, block_templates, plan.layers, strict=True):
            assert isinstance(fused, FusedBlock)
            stream = places[layer.layer]
            blocks.append(_member_block(fused, template, host.family, layer, stream))
    result = _with_blocks(model, body, host, blocks)
    for path, module in list(result.named_modules()):
        if isinstance(module, PerStream) and path:
            owner, _, leaf = path.rpartition(".")
            if owner.startswith(host.blocks_path):
                continue
            setattr(result.get_submodule(owner), leaf, module.each[plan.streams[member]])
    counts = [Block.of(i, block, host.family).attention.num_heads for i, block in enumerate(blocks)]
    if tuple(counts) == plan.masks[member].kept:  # no head is gated off
        result.hydra_head_mask = plan.masks[member]  # type: ignore[assignment]
    return twin(result).train(model.training)  # its mode is its own, also in the shared parts


def _member_block(
    fused: FusedBlock, template: nn.Module, family: Family, layer: LayerPlan, stream: int
) -> nn.Module:
    """Fill a template with one stream's weights: shared parts by reference, its heads by copy."""
    device = fused.bank.qkv.device
    module = copy.deepcopy(template)
    for part in module.modules():  # buffers come from the template
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)
    block = Block.of(layer.layer, module, family)
    plan = fused.bank.plan
    group = layer.parents[stream] if plan.shared else stream

    def set_part(path_of: nn.Module, part: PerStream, index: int) -> None:
        replacement = part.of(index)
        for owner in module.modules():
            for name, child in owner.named_children():
                if child is path_of:
                    setattr(owner, name, replacement)

    assert block.norm1 is not None and block.norm2 is not None
    after = [
        (part, path)
        for name in ("after_attention", "after_mlp")
        for part, path in zip(
            getattr(fused, name),
            [
                p
                for p in block.names(getattr(family, name))
                if not isinstance(block.part(p), nn.Identity)
            ],
            strict=True,
        )
    ]
    names = list(block.mlp_names)
    heads = plan.heads[stream]
    weights = fused.bank.weights(heads)
    if fused.places:
        places = [fused.places[head] for head in heads]
        weights = weights.spread(places, block.attention.num_heads)
    block.attention.replace_(weights, fused.output_bias.of(stream))
    set_part(block.norm1, fused.norm1, group if family.norm == "pre" else stream)
    set_part(block.norm2, fused.norm2, stream)
    query_norm, key_norm = block.attention.head_norms
    for old, head_norm in ((query_norm, fused.query_norm), (key_norm, fused.key_norm)):
        if old is not None and head_norm is not None:
            set_part(old, head_norm, group)
    for part, path in after:
        chosen = part.of(stream)
        value = chosen.weight if isinstance(chosen, Scale) else chosen
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)
    for path, mlp in zip(names, fused.mlp_of(stream), strict=True):
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, mlp)
    return module


def _with_blocks(
    model: nn.Module, body: Body | HostedBody, host: HostView, blocks: Sequence[nn.Module]
) -> nn.Module:
    """Copy the host's structure around other blocks; parameters stay the same tensors."""
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for standing in model.get_submodule(host.blocks_path).children():
        memo[id(standing)] = nn.Identity()
    result = copy.deepcopy(model, memo)
    parent, _, name = host.blocks_path.rpartition(".")
    sequential = isinstance(result.get_submodule(host.blocks_path), nn.Sequential)
    new = nn.Sequential(*blocks) if sequential else nn.ModuleList(blocks)
    setattr(result.get_submodule(parent), name, new)
    return result


def unpruned_model(
    model: nn.Module, body: Body | HostedBody, block_templates: Sequence[nn.Module], host: HostView
) -> nn.Module:
    """Return the host with all its heads and neurons, blocks without storage: for counting."""
    blocks: list[nn.Module] = []
    shape = body.plan.masks[0].shape
    for layer in range(body.plan.depth):
        if isinstance(body, HostedBody):
            blocks.append(copy.deepcopy(block_templates[layer]))
            continue
        if layer < body.plan.trunk:
            module = copy.deepcopy(body.trunk[layer]).to("meta")
        else:
            module = copy.deepcopy(block_templates[layer - body.plan.trunk]).to("meta")
        site = AttentionSite(layer, module, host.family)
        if site.num_heads != shape[layer]:
            site.grow_(shape[layer])
        blocks.append(module)
    for block in blocks:
        grow_neurons_(block)
    result = _with_blocks(model, body, host, blocks)
    for path, part in list(result.named_modules()):
        if isinstance(part, PerStream) and path:
            owner, _, leaf = path.rpartition(".")
            setattr(result.get_submodule(owner), leaf, part.each[0])
    return result
