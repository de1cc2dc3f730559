"""Make a hosted ensemble: the host's own blocks, pruned or gated, one copy per stream."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.head_mask import HeadMask
from ..heads.stream_plan import LayerPlan, LayerSignature, Plan, make_plan
from ..hosts import Block, HostModel
from ..hosts.head_removal import Cut, best_cut
from .equal_parts import identities
from .host_engine import HostedBlock, HostedBody, Hosting
from .member import share_parameters

Cuts = list[list[dict[str, list[int]]]]
"""`[layer][stream]`: heads that physically remain and heads that are on, by place in the block."""


def hosted_plan(
    masks: Sequence[HeadMask],
    hosts: Sequence[HostModel],
    merged: HostModel,
    classifiers: Sequence[Any] | None,
    *,
    share_trunk: bool,
    branch_layer: int | None,
    seconds: Sequence[str | None],
) -> Plan:
    """Plan the streams: members branch where their heads or any other weights differ."""
    depth = len(masks[0])
    contents = [_contents(hosts, merged, layer, seconds[layer]) for layer in range(depth)]
    signatures = [
        [
            LayerSignature(tuple(mask.indices(layer)), 0, contents[layer][member])
            for layer in range(depth)
        ]
        for member, mask in enumerate(masks)
    ]
    return make_plan(
        masks,
        signatures,
        classifiers,
        share_trunk=share_trunk,
        share_branch=False,
        readout_only=False,
        branch_layer=branch_layer,
    )


def _contents(
    hosts: Sequence[HostModel], merged: HostModel, layer: int, second: str | None
) -> list[int]:
    """Number members by the content of their block, apart from the averaged parts."""
    if len({id(host.model) for host in hosts}) == 1:
        return [0] * len(hosts)
    return identities([[_with_merged(host, merged, layer, second)] for host in hosts])


def _with_merged(
    host: HostModel, merged: HostModel, layer: int, second: str | None = None
) -> nn.Module:
    """Return a member's block with the averaged MLP; its own parameters are shared, not copied.

    Args:
        host: The member.
        merged: The host with averaged MLPs.
        layer: Index of the block.
        second: Path of a layer of the MLP that stays the member's own, or None.
    """
    block, base = host.blocks[layer], merged.blocks[layer]
    module = share_parameters(block.module)
    for path in block.mlp_names:
        module.set_submodule(path, share_parameters(base.module.get_submodule(path)))
    if second is not None:
        module.set_submodule(second, block.module.get_submodule(second))
    return module


def all_layers(plan: Plan) -> list[LayerPlan]:
    """Return one plan per block; the trunk's blocks have one stream."""
    trunk = [
        LayerPlan(layer, (0,), (0,), (plan.trunk_heads[layer],), shared=False)
        for layer in range(plan.trunk)
    ]
    return [*trunk, *plan.layers]


def choose_cuts(plan: Plan, hosts: Sequence[HostModel]) -> Cuts:
    """Choose for every stream which heads to remove physically and which to gate off."""
    calls = hosts[0].passes()[-1]
    result: Cuts = []
    known: dict[Any, Cut] = {}
    for layer in all_layers(plan):
        row = []
        for member, heads in zip(layer.members, layer.heads, strict=True):
            host = hosts[member]
            block = host.blocks[layer.layer]
            places = _places(host, layer.layer, heads)
            key = (layer.layer, id(block.module), tuple(places))
            if key not in known:
                call = calls[layer.layer] if host is hosts[0] or _alike(host, hosts[0]) else None
                known[key] = best_cut(block, places, call)
            row.append({"there": list(known[key].there), "on": list(known[key].on)})
        result.append(row)
    return result


def _alike(host: HostModel, other: HostModel) -> bool:
    return type(host.model) is type(other.model)


def _places(host: HostModel, layer: int, heads: Sequence[int]) -> list[int]:
    """Return the places of original heads among those that a pruned host still has."""
    if host.original_mask is None:
        return list(heads)
    remaining = host.original_mask.indices(layer)
    return [remaining.index(head) for head in heads]


def host_blocks_(
    base: HostModel,
    plan: Plan,
    cuts: Cuts,
    *,
    hosts: Sequence[HostModel] | None = None,
    seconds: Sequence[str | None] | None = None,
    folds: bool,
) -> tuple[HostedBody, tuple[nn.Module, ...]]:
    """Replace a host's blocks by hosted blocks, in place.

    Args:
        base: The host; its MLPs are averaged already.
        plan: Which streams run where.
        cuts: The heads that each stream keeps.
        hosts: The members, if they were fine-tuned; by default all are `base`.
        seconds: Per block, the path of the MLP's layer that stays the members' own, or None.
        folds: Whether streams are folded into the batch.

    Returns:
        The body, and all blocks with all heads, without storage (for counting).
    """
    block_templates = tuple(copy.deepcopy(block.module).to("meta") for block in base.blocks)
    hosting = Hosting(plan, base.readout, base.family, folds)
    layers = []
    for layer, row in zip(all_layers(plan), cuts, strict=True):
        streams: list[nn.Module] = []
        for member, cut in zip(layer.members, row, strict=True):
            if hosts is None or hosts[member].model is hosts[0].model:
                module = share_parameters(base.blocks[layer.layer].module)
            else:
                second = None if seconds is None else seconds[layer.layer]
                module = copy.deepcopy(_with_merged(hosts[member], base, layer.layer, second))
            block = Block.of(layer.layer, module, base.family)
            Cut(tuple(cut["there"]), tuple(cut["on"])).apply_(block)
            share_equal_(module, streams or [base.blocks[layer.layer].module])
            streams.append(module)
        layers.append(HostedBlock(streams, layer, hosting))
    base.replace_blocks_(layers)
    return HostedBody(layers), block_templates


@torch.no_grad()
def share_equal_(module: nn.Module, others: Sequence[nn.Module]) -> None:
    """Share the parameters of other modules, in place, wherever their values are equal."""
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta:
                continue
            for other in others:
                theirs = _parameter(other, path, name)
                same_shape = theirs is not None and theirs.shape == parameter.shape
                if same_shape and theirs is not parameter and torch.equal(theirs, parameter):  # type: ignore[arg-type]
                    setattr(part, name, theirs)
                    break


def _parameter(module: nn.Module, path: str, name: str) -> nn.Parameter | None:
    try:
        parameter = getattr(module.get_submodule(path), name)
    except AttributeError:
        return None
    return parameter if isinstance(parameter, nn.Parameter) else None


def tie_(model: nn.Module, inside: str, aliases: Mapping[str, str]) -> None:
    """Tie the parameters of hosted blocks that were tied when saved; untie all others.

    Args:
        model: A host with hosted blocks.
        inside: The path of its blocks.
        aliases: Names of tied tensors, and the name of the tensor that each is tied to.
    """
    for name in list(model.state_dict()):
        if not name.startswith(inside + "."):
            continue
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = getattr(module, leaf, None)
        if not isinstance(parameter, nn.Parameter):
            continue
        if aliases.get(name, "").startswith(inside + "."):
            other, _, other_leaf = aliases[name].rpartition(".")
            setattr(module, leaf, getattr(model.get_submodule(other), other_leaf))
        else:
            untied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, leaf, untied)


def distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep each tensor once; return the other names as aliases.

    A tensor is copied only where a file needs it: off the CPU, not contiguous, or in a storage that
    it shares with another one.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in names:
            aliases[name] = names[key]
        else:
            names[key] = name
            plain = tensor.detach().cpu().contiguous()
            place = plain.untyped_storage().data_ptr()
            tensors[name] = plain.clone() if place in storages else plain
            storages.add(place)
    return tensors, aliases
