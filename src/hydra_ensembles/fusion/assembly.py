"""Members in, fused model out: find what is equal, plan the streams, fill in the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import MaskError, UnsupportedModelError
from ..heads.head_mask import HeadMask, check_fits, describe_shape
from ..heads.stream_plan import Plan, make_plan
from ..hosts import Block, HostModel, host_model
from ..hosts.architecture import describe_host
from ..hosts.block import last_linear
from ..hosts.probes import modules_after_blocks
from ..registry import check_name
from .body import Body
from .equal_parts import LayerParts, average_, identities, mean
from .fused_block import FusedBlock
from .host_engine import HostedBody
from .host_engine_blocks import choose_cuts, host_blocks_, hosted_plan
from .streams import PerStream
from .structure import build_body_, split_classifier_
from .verification import Reference


@dataclass(frozen=True)
class Assembly:
    """What `assemble` made: the host with its body, the plan, and what was averaged."""

    model: nn.Module
    body: Body | HostedBody
    plan: Plan
    block_templates: tuple[nn.Module, ...]
    copies: dict[str, int]
    merged: tuple[str, ...]
    description: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


def assemble(
    members: Sequence[HostModel],
    masks: Sequence[HeadMask] | None,
    *,
    share_trunk: bool,
    share_branch: bool,
    readout_only: bool,
    average: str,
    branch_layer: int | None = None,
    engine: str = "fused",
    folds: bool = True,
) -> tuple[Assembly, Iterator[Reference]]:
    """Fuse members into one model (see `fuse`); return it and the members to compare it with.

    Args:
        engine: `"fused"`, our own arithmetic, or `"host"`, the host's own blocks.
        folds: Whether the host engine folds streams into the batch.
    """
    masks, hosts = _masks_of(list(members), masks)
    readout = hosts[0].readout
    description = describe_host(hosts[0].model)
    base = HostModel(copy.deepcopy(hosts[0].model), family=hosts[0].family, facts=hosts[0].facts)
    merged = _merge_(base, hosts, average)
    seconds = _own_seconds(base, average)
    if average == "all":
        hosts = _with_averaged_rest(base, hosts)
    classifier, classifier_ids = _differing_classifiers(hosts)
    if engine == "host":
        plan = hosted_plan(
            masks,
            hosts,
            base,
            classifier_ids,
            share_trunk=share_trunk,
            branch_layer=branch_layer,
            seconds=seconds,
        )
        cuts = choose_cuts(plan, hosts)
        hosted, block_templates = host_blocks_(
            base, plan, cuts, hosts=hosts, seconds=seconds, folds=folds
        )
        copies = _split_classifiers_(base, plan, hosts, classifier)
        how = {"engine": "host", "folds": folds, "cuts": cuts}
        assembly = Assembly(
            base.model, hosted, plan, block_templates, copies, merged, description, how
        )
        return assembly, _references(hosts, masks, average)
    layers = [
        LayerParts(hosts, masks, layer, second=second) for layer, second in enumerate(seconds)
    ]
    plan = make_plan(
        masks,
        [[parts.signature(m) for parts in layers] for m in range(len(hosts))],
        classifier_ids,
        share_trunk=share_trunk,
        share_branch=share_branch,
        readout_only=readout_only and (readout.tokens is not None or readout.positions is not None),
        branch_layer=branch_layer,
    )
    copies = {}
    for layer_plan in plan.layers:
        copies.update(layers[layer_plan.layer].copies(layer_plan, base.family.norm))
    body, block_templates = build_body_(base, plan, copies)
    for block, layer_plan in zip(body.branch, plan.layers, strict=True):
        assert isinstance(block, FusedBlock)
        layers[layer_plan.layer].fill_(block, layer_plan, base.family.norm)
    copies.update(_split_classifiers_(base, plan, hosts, classifier))
    settings = base.arithmetic.settings()
    settings |= {"form": str(body.form)} if str(body.form) else {}
    assembly = Assembly(
        base.model, body, plan, block_templates, copies, merged, description, settings
    )
    return assembly, _references(hosts, masks, average)


def _split_classifiers_(
    base: HostModel, plan: Plan, hosts: list[HostModel], paths: list[str]
) -> dict[str, int]:
    """Give modules after the blocks in which members differ one copy per stream, in place."""
    ends = _representatives(plan)
    copies = {f"classifier.{path}": len(ends) for path in paths}
    split_classifier_(base.model, copies)
    for path in paths:
        split = base.model.get_submodule(path)
        assert isinstance(split, PerStream)
        for module, member in zip(split.each, ends, strict=True):
            module.load_state_dict(hosts[member].model.get_submodule(path).state_dict())
    if hasattr(base.model, "hydra_head_mask"):
        del base.model.hydra_head_mask
    return copies


def _references(hosts: list[HostModel], masks: list[HeadMask], average: str) -> Iterator[Reference]:
    """Yield the members as plain hosts; fine-tuned ones with the averaged parts."""
    tuned = len({id(host.model) for host in hosts}) > 1
    for host, mask in zip(hosts, masks, strict=True):
        if host.original_mask is not None:
            remaining = [host.original_mask.indices(layer) for layer in range(len(host))]
            mask = HeadMask([row[index] for row, index in zip(mask, remaining, strict=True)])
        if not tuned:
            yield Reference(host, mask)
            continue
        twin = host_model(copy.deepcopy(host.model), family=host.family)
        _merge_(twin, hosts, average)
        yield Reference(twin, mask)


def _representatives(plan: Plan) -> list[int]:
    """Return, for every stream of the classifier, the first member that ends in it."""
    return [plan.streams.index(end) for end in range(len(plan.ends))]


def _masks_of(
    hosts: list[HostModel], masks: Sequence[HeadMask] | None
) -> tuple[list[HeadMask], list[HostModel]]:
    """Return one mask and one host per member, masks in terms of the original heads."""
    if masks is None:
        masks = [HeadMask.full(host) for host in hosts]
    else:
        masks = [mask if isinstance(mask, HeadMask) else HeadMask(mask) for mask in masks]
    if len(hosts) == 1:
        hosts = hosts * len(masks)
    if len(hosts) != len(masks):
        raise MaskError(
            f"{len(hosts)} members but {len(masks)} masks: give one mask per member, or one model."
        )
    if not masks:
        raise MaskError("No masks: an ensemble needs at least one member.")
    result = []
    for host, mask in zip(hosts, masks, strict=True):
        original = host.original_mask
        if original is not None and mask.shape == original.shape and mask == original:
            result.append(mask)  # the recorded mask itself, in terms of the original heads
            continue
        check_fits(mask, host)
        result.append(mask if original is None else _within(original, mask))
    first = hosts[0]
    for host in hosts[1:]:
        same_shape = host.width == first.width and len(host) == len(first)
        if not same_shape or host.family is not first.family:
            raise UnsupportedModelError(
                f"Members differ in shape: {first.name} with {len(first)} layers of width "
                f"{first.width} and {host.name} with {len(host)} of width {host.width}. Members "
                "must be fine-tuned from one model."
            )
        sizes = [[_mlp_shapes(block) for block in member.blocks] for member in (first, host)]
        layer = next((i for i, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b), None)
        if layer is not None:
            raise UnsupportedModelError(
                f"Members keep different numbers of neurons in layer {layer}. Members share their "
                "MLPs: prune the model before it is fine-tuned, or keep equal numbers."
            )
    if len({mask.shape for mask in result}) > 1:
        raise MaskError(
            "Members had different numbers of heads before they were pruned: "
            + ", ".join(describe_shape(mask.shape) for mask in result)
        )
    return result, hosts


def _mlp_shapes(block: Block) -> list[torch.Size]:
    return [p.shape for path in block.mlp_names for p in block.part(path).parameters()]


def _within(original: HeadMask, mask: HeadMask) -> HeadMask:
    """Express a mask of the remaining heads in terms of the original heads."""
    rows = []
    for old, new in zip(original, mask, strict=True):
        row = old.clone()
        row[old.nonzero().flatten()[~new]] = False
        rows.append(row)
    return HeadMask(rows)


def _merge_(base: HostModel, hosts: list[HostModel], average: str) -> tuple[str, ...]:
    """Average the members' MLPs, and what comes before the blocks, into the base."""
    check_name("average", average, ("mlp", "first", "all"))
    merged = []
    differ = [
        average_(
            block.module.get_submodule(path),
            [host.blocks[block.index].module.get_submodule(path) for host in hosts],
            but=_inside(second, path),
        )
        for block, second in zip(base.blocks, _own_seconds(base, average), strict=True)
        for path in block.mlp_names
    ]
    if any(differ):
        merged.append("MLPs")
    if len({id(host.model) for host in hosts}) > 1 and _merge_outside_(base, hosts, average):
        merged.append("embeddings")
    return tuple(merged)


def _own_seconds(base: HostModel, average: str) -> list[str | None]:
    """Return, per block, the path of the second linear layer that members keep, or None."""
    if average != "first":
        return [None] * len(base)
    paths = [last_linear(block) for block in base.blocks]
    if None in paths:
        raise UnsupportedModelError(
            f'average="first" needs MLPs that end with a linear layer, and block '
            f'{paths.index(None)} of {base.name} does not. Fuse with average="mlp".'
        )
    return paths


def _inside(path: str | None, module: str) -> str | None:
    """Return a path relative to the module at another path; None if it leads elsewhere."""
    if path is None or not f"{path}.".startswith(f"{module}."):
        return None
    return path.removeprefix(module).removeprefix(".")


def _merge_outside_(base: HostModel, hosts: list[HostModel], average: str) -> bool:
    """Average parameters outside the blocks that cannot, or should not, differ by member."""
    states = [dict(host.model.named_parameters()) for host in hosts]
    inside = base.blocks_path + "."
    after = () if average == "all" else modules_after_blocks(base)
    differed = False
    with torch.no_grad():
        for name, parameter in base.model.named_parameters():
            if name.startswith(inside) or name.rpartition(".")[0] in after:
                continue
            values = [state[name] for state in states]
            if any(not torch.equal(values[0], value) for value in values[1:]):
                parameter.copy_(mean(values))
                differed = True
    return differed


def _with_averaged_rest(base: HostModel, hosts: list[HostModel]) -> list[HostModel]:
    """Average norms, layer scales and output biases over members, so that only heads differ."""
    result = []
    for host in hosts:
        twin = host_model(copy.deepcopy(host.model), family=host.family)
        for block in twin.blocks:
            others = [h.blocks[block.index] for h in hosts]
            family = block.family
            paths = block.names(family.after_attention + family.after_mlp)
            for path in paths:
                average_(block.part(path), [other.part(path) for other in others])
            for name in ("norm1", "norm2"):
                if getattr(block, name) is not None:
                    average_(getattr(block, name), [getattr(other, name) for other in others])
            bias = block.attention.output_bias
            if bias is not None:
                values = [other.attention.output_bias for other in others]
                with torch.no_grad():
                    bias.copy_(mean([value for value in values if value is not None]))
        for path in modules_after_blocks(twin):
            average_(twin.model.get_submodule(path), [h.model.get_submodule(path) for h in hosts])
        result.append(twin)
    for block, twin_block in zip(base.blocks, result[0].blocks, strict=True):
        for name in ("norm1", "norm2"):
            if getattr(block, name) is not None:
                getattr(block, name).load_state_dict(getattr(twin_block, name).state_dict())
    return result


def _differing_classifiers(hosts: list[HostModel]) -> tuple[list[str], list[int] | None]:
    """Find the modules after the blocks in which members differ."""
    if len({id(host.model) for host in hosts}) == 1:
        return [], None
    paths = modules_after_blocks(hosts[0])
    differing = [
        path
        for path in paths
        if max(identities([[host.model.get_submodule(path)] for host in hosts])) > 0
    ]
    if not differing:
        return [], None
    if not hosts[0].readout.folds:
        raise UnsupportedModelError(
            f"Members differ after their blocks ({', '.join(differing)}), and {hosts[0].name} "
            'reads a position of each sample there. Fuse with average="all".'
        )
    return differing, identities(
        [[host.model.get_submodule(path) for path in differing] for host in hosts]
    )
