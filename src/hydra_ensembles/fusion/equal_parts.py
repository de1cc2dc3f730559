"""One layer of all members: which heads and other parts are equal, and how to fill them in.

What members share: averages of modules, and which of their parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.head_mask import HeadMask
from ..heads.stream_plan import LayerPlan, LayerSignature
from ..hosts import Block, HostModel
from ..hosts.head_weights import HeadWeights
from .fused_block import FusedBlock
from .streams import PerStream


def same(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules hold equal parameters and buffers."""
    if first is second:
        return True
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def identities(modules: Sequence[Sequence[nn.Module]]) -> list[int]:
    """Number members by the content of their modules: equal content, equal number."""
    distinct: list[Sequence[nn.Module]] = []
    numbers = []
    for parts in modules:
        for number, other in enumerate(distinct):
            if all(same(a, b) for a, b in zip(parts, other, strict=True)):
                numbers.append(number)
                break
        else:
            numbers.append(len(distinct))
            distinct.append(parts)
    return numbers


@torch.no_grad()
def average_(target: nn.Module, sources: Sequence[nn.Module], *, but: str | None = None) -> bool:
    """Set a module's floating-point state to the mean of others; return whether they differed.

    W = mean_m W^(m), b = mean_m b^(m) (Hydra Ensembles, the merged MLP). Equal sources change
    nothing, to the last bit. The submodule `but` keeps its own state ("" is the whole module).
    """
    differ = False
    states = [source.state_dict() for source in sources]
    for name, tensor in target.state_dict().items():
        if but is not None and f".{name}".startswith(f".{but}." if but else "."):
            continue
        if any(not torch.equal(states[0][name], state[name]) for state in states[1:]):
            differ = True
            if tensor.is_floating_point():
                tensor.copy_(mean([state[name] for state in states]))
    return differ


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Average tensors in float64 (a mean of equal ones is exact)."""
    return torch.stack([t.double() for t in tensors]).mean(0).to(tensors[0].dtype)


class LayerParts:
    """One layer of all members: its distinct heads and which other parts differ."""

    def __init__(
        self, hosts: list[HostModel], masks: list[HeadMask], layer: int, *, second: str | None
    ) -> None:
        """Compare the members.

        Args:
            hosts, masks: The members.
            layer: Index of the block.
            second: Path of the MLP's last linear layer if members keep their own, else None.
        """
        self.layer = layer
        self.second_path = second
        self.blocks = [host.blocks[layer] for host in hosts]
        first = self.blocks[0]
        norms = [[b.norm1, *filter(None, b.attention.head_norms)] for b in self.blocks]
        self.norm = identities(norms)  # type: ignore[arg-type]
        after = first.names(first.family.after_attention + first.family.after_mlp)
        self.rest = identities(
            [[b.norm2, *(b.part(path) for path in after)] for b in self.blocks]  # type: ignore[list-item]
        )
        self.second = [0] * len(hosts)
        if second is not None:
            self.second = identities([[b.module.get_submodule(second)] for b in self.blocks])
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
            remaining = (
                list(range(mask.shape[self.layer]))
                if host.original_mask is None
                else host.original_mask.indices(self.layer)
            )
            kept = []
            for head in mask.indices(self.layer):
                place = remaining.index(head)
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
        """Return what decides whether a member shares a stream with another."""
        return LayerSignature(
            self.heads[member],
            self.norm[member],
            (self.rest[member], self.bias[member], self.second[member]),
        )

    def _second_name(self) -> str:
        """Name the last linear layer as part of a fused block: `mlp.1`, or `mlp.0.fc2`."""
        assert self.second_path is not None
        for place, path in enumerate(self.blocks[0].mlp_names):
            if f"{self.second_path}.".startswith(f"{path}."):
                return f"mlp.{place}{self.second_path.removeprefix(path)}"
        raise AssertionError(self.second_path)

    def copies(self, plan: LayerPlan, norm: str) -> dict[str, int]:
        """Count the copies of the parts that differ between streams."""
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
        if len({self.second[m] for m in streams}) > 1:
            result[self._second_name()] = len(streams)
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
        if len({self.second[m] for m in streams}) > 1:
            second: Any = fused.get_submodule(self._second_name())
            self._fill(second, streams, lambda b: b.module.get_submodule(self.second_path))
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
    distinct: list[Tensor | None] = []
    numbers = []
    for tensor in tensors:
        for number, other in enumerate(distinct):
            if tensor is other or (
                tensor is not None and other is not None and torch.equal(tensor, other)
            ):
                numbers.append(number)
                break
        else:
            numbers.append(len(distinct))
            distinct.append(tensor)
    return numbers
