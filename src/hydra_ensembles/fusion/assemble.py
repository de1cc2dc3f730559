"""Members in, fused model out: find what is equal, plan the streams, fill in the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MaskError, UnsupportedModelError
from ..heads.masks import HeadMask, check_fits, describe_shape
from ..heads.plan import LayerPlan, LayerSignature, Plan, make_plan
from ..hosts import Block, HostModel, host_model
from ..hosts.probe import modules_after_blocks
from ..hosts.rebuild import describe_host
from ..hosts.sites import HeadWeights
from ..registry import check_name
from .body import Body
from .hosted import HostedBody
from .hosting import choose_cuts, host_blocks_, hosted_plan
from .layers import FusedBlock, PerStream
from .merge import average_, identities, mean
from .structure import build_body_, split_classifier_
from .verifying import Reference


@dataclass(frozen=True)
class Assembly:
    """What `assemble` made: the host with its body, the plan, and what was averaged."""

    model: nn.Module
    body: Body | HostedBody
    plan: Plan
    moulds: tuple[nn.Module, ...]
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
    base = host_model(copy.deepcopy(hosts[0].model), family=hosts[0].family)
    base.__dict__["readout"] = readout  # probed once, as the next two were
    base.arithmetic = hosts[0].arithmetic
    base.__dict__["forms"] = hosts[0].forms
    merged = _merge_(base, hosts, average)
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
        )
        cuts = choose_cuts(plan, hosts)
        hosted, moulds = host_blocks_(base, plan, cuts, hosts=hosts, folds=folds)
        copies = _split_classifiers_(base, plan, hosts, classifier)
        how = {"engine": "host", "folds": folds, "cuts": cuts}
        assembly = Assembly(base.model, hosted, plan, moulds, copies, merged, description, how)
        return assembly, _references(hosts, masks, average)
    layers = [_LayerParts(hosts, masks, layer) for layer in range(len(base))]
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
    body, moulds = build_body_(base, plan, copies)
    for block, layer_plan in zip(body.branch, plan.layers, strict=True):
        assert isinstance(block, FusedBlock)
        layers[layer_plan.layer].fill_(block, layer_plan, base.family.norm)
    copies.update(_split_classifiers_(base, plan, hosts, classifier))
    settings = base.arithmetic.settings()
    settings |= {"form": str(body.form)} if str(body.form) else {}
    assembly = Assembly(base.model, body, plan, moulds, copies, merged, description, settings)
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
    """Yield the members as plain hosts; those that were fine-tuned with what is averaged."""
    tuned = len({id(host.model) for host in hosts}) > 1
    for host, mask in zip(hosts, masks, strict=True):
        if host.original_mask is not None:
            there = [host.original_mask.indices(layer) for layer in range(len(host))]
            mask = HeadMask([row[index] for row, index in zip(mask, there, strict=True)])
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
    """Return one mask and one host a member, masks in terms of the original heads."""
    if masks is None:
        masks = [HeadMask.full(host) for host in hosts]
    else:
        masks = [mask if isinstance(mask, HeadMask) else HeadMask(mask) for mask in masks]
    if len(hosts) == 1:
        hosts = hosts * len(masks)
    if len(hosts) != len(masks):
        raise MaskError(
            f"{len(hosts)} members but {len(masks)} masks: give one mask a member, or one model."
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
    if len({mask.shape for mask in result}) > 1:
        raise MaskError(
            "Members had different numbers of heads before they were pruned: "
            + ", ".join(describe_shape(mask.shape) for mask in result)
        )
    return result, hosts


def _within(original: HeadMask, mask: HeadMask) -> HeadMask:
    """Express a mask of the heads that are left in terms of the original ones."""
    rows = []
    for old, new in zip(original, mask, strict=True):
        row = old.clone()
        row[old.nonzero().flatten()[~new]] = False
        rows.append(row)
    return HeadMask(rows)


def _merge_(base: HostModel, hosts: list[HostModel], average: str) -> tuple[str, ...]:
    """Average the members' MLPs, and what stands before the blocks, into the base."""
    check_name("average", average, ("mlp", "all"))
    merged = []
    differ = [
        average_(
            block.module.get_submodule(path),
            [host.blocks[block.index].module.get_submodule(path) for host in hosts],
        )
        for block in base.blocks
        for path in block.mlp_names
    ]
    if any(differ):
        merged.append("MLPs")
    if len({id(host.model) for host in hosts}) > 1 and _merge_outside_(base, hosts, average):
        merged.append("embeddings")
    return tuple(merged)


def _merge_outside_(base: HostModel, hosts: list[HostModel], average: str) -> bool:
    """Average parameters outside the blocks that cannot, or shall not, be kept by member."""
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
    """Average norms, layer scales and output biases over members; only heads differ then."""
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


class _LayerParts:
    """One layer of all members: its distinct heads and which other parts differ."""

    def __init__(self, hosts: list[HostModel], masks: list[HeadMask], layer: int) -> None:
        self.layer = layer
        self.blocks = [host.blocks[layer] for host in hosts]
        first = self.blocks[0]
        norms = [[b.norm1, *filter(None, b.attention.head_norms)] for b in self.blocks]
        self.norm = identities(norms)  # type: ignore[arg-type]
        after = first.names(first.family.after_attention + first.family.after_mlp)
        self.rest = identities(
            [[b.norm2, *(b.part(path) for path in after)] for b in self.blocks]  # type: ignore[list-item]
        )
        self.bias = _equal_tensors([b.attention.output_bias for b in self.blocks])
        self._find_heads(hosts, masks)

    def _find_heads(self, hosts: list[HostModel], masks: list[HeadMask]) -> None:
        """Number the distinct heads: the same head with the same weights has one number."""
        self.heads: list[tuple[int, ...]] = []
        self.sources: list[tuple[HeadWeights, int]] = []
        known: dict[int, list[int]] = {}
        cache: dict[int, HeadWeights] = {}
        for host, mask, block in zip(hosts, masks, self.blocks, strict=True):
            weights = cache.setdefault(id(block.attention), block.attention.weights())
            there = (
                list(range(mask.shape[self.layer]))
                if host.original_mask is None
                else host.original_mask.indices(self.layer)
            )
            kept = []
            for head in mask.indices(self.layer):
                place = there.index(head)
                for number in known.setdefault(head, []):
                    if _same_head(self.sources[number], (weights, place)):
                        break
                else:
                    number = len(self.sources)
                    self.sources.append((weights, place))
                    known[head].append(number)
                kept.append(number)
            self.heads.append(tuple(kept))

    def signature(self, member: int) -> LayerSignature:
        return LayerSignature(
            self.heads[member], self.norm[member], (self.rest[member], self.bias[member])
        )

    def copies(self, plan: LayerPlan, norm: str) -> dict[str, int]:
        """Say which parts need one copy a stream."""
        streams = [plan.members[s] for s in range(plan.streams)]
        groups = _group_members(plan)
        result = {}
        if len({self.norm[m] for m in streams}) > 1:
            result["norm1"] = len(groups) if norm == "pre" else len(streams)
            result["query_norm"] = result["key_norm"] = len(groups)
        if len({self.rest[m] for m in streams}) > 1:
            family = self.blocks[0].family
            result["norm2"] = len(streams)
            for name in ("after_attention", "after_mlp"):
                for i in range(len(self.blocks[0].names(getattr(family, name)))):
                    result[f"{name}.{i}"] = len(streams)
        if len({self.bias[m] for m in streams}) > 1:
            result["output_bias"] = len(streams)
        return {f"{self.layer}.{name}": count for name, count in result.items()}

    @torch.no_grad()
    def fill_(self, fused: FusedBlock, plan: LayerPlan, norm: str) -> None:
        """Copy the members' weights into a fused block."""
        bank = fused.bank
        for number, (weights, place) in enumerate(self.sources):
            bank.qkv[:, number] = torch.stack(
                [getattr(weights, name)[place] for name in ("query", "key", "value")]
            )
            bank.output[number] = weights.output[place]
            if bank.positions is not None and weights.positions is not None:
                bank.positions[number] = weights.positions[place]
            if bank.bias is not None:
                for row, name in enumerate(("query_bias", "key_bias", "value_bias")):
                    bias = getattr(weights, name)
                    bank.bias[row, number] = 0.0 if bias is None else bias[place]
        streams, groups = list(plan.members), _group_members(plan)
        self._fill(fused.norm1, groups if norm == "pre" else streams, lambda b: b.norm1)
        self._fill(fused.norm2, streams, lambda b: b.norm2)
        for part, index in ((fused.query_norm, 0), (fused.key_norm, 1)):
            if part is not None:
                self._fill(part, groups, partial(_head_norm, index))
        for name in ("after_attention", "after_mlp"):
            paths = self.blocks[0].names(getattr(self.blocks[0].family, name))
            real = [p for p in paths if not isinstance(self.blocks[0].part(p), nn.Identity)]
            for part, path in zip(getattr(fused, name), real, strict=True):
                self._fill(part, streams, partial(_part, path))
        if fused.output_bias.value is not None:
            members = streams if len(fused.output_bias.value) > 1 else streams[:1]
            for row, member in enumerate(members):
                bias = self.blocks[member].attention.output_bias
                assert bias is not None
                fused.output_bias.value[row] = bias

    def _fill(self, part: PerStream, members: Sequence[int], get: Callable[[Any], Any]) -> None:
        for module, member in zip(part.each, members, strict=False):
            module.load_state_dict(get(self.blocks[member]).state_dict())


def _head_norm(index: int, block: Block) -> nn.Module | None:
    return block.attention.head_norms[index]


def _part(path: str, block: Block) -> nn.Module:
    return block.part(path)


def _group_members(plan: LayerPlan) -> list[int]:
    """Return, for every projection group, the first member that it serves."""
    if not plan.shared:
        return list(plan.members)
    return [
        next(m for p, m in zip(plan.parents, plan.members, strict=True) if p == parent)
        for parent in range(plan.inputs)
    ]


def _same_head(a: tuple[HeadWeights, int], b: tuple[HeadWeights, int]) -> bool:
    if a[0] is b[0] and a[1] == b[1]:
        return True
    for name in HeadWeights.__dataclass_fields__:
        x, y = getattr(a[0], name), getattr(b[0], name)
        if x is not None and not torch.equal(x[a[1]], y[b[1]]):
            return False
    return True


def _equal_tensors(tensors: Sequence[Tensor | None]) -> list[int]:
    found: list[Tensor | None] = []
    numbers = []
    for tensor in tensors:
        for number, known in enumerate(found):
            if tensor is known or (
                tensor is not None and known is not None and torch.equal(tensor, known)
            ):
                numbers.append(number)
                break
        else:
            numbers.append(len(found))
            found.append(tensor)
    return numbers
