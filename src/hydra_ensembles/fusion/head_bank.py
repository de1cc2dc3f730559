"""The head bank: every distinct head of a block stored once, packed by members for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..heads.stream_plan import LayerPlan
from ..hosts.head_weights import HeadWeights


@dataclass(frozen=True)
class Packed:
    """Weights in the layout that the GEMMs need.

    Attributes:
        projections: For every projection group: the input stream, weight [3 * heads * width, d]
            with rows [q | k | v], and bias.
        outputs: For every stream: its group, which columns of the group's attention it takes (a
            slice when they are contiguous) and W_O [d, columns].
        qkv: When all groups have the same number of heads: the projections' weights and biases in
            one tensor each, [groups, 3 * heads * width, d]; `projections` are views of them.
        output: When every stream takes all of its own group, all of one size: W_O of all streams,
            [streams, d, columns]; `outputs` are views of it.
    """

    projections: list[tuple[int, Tensor, Tensor | None]]
    outputs: list[tuple[int, slice | Tensor, Tensor]]
    qkv: tuple[Tensor, Tensor | None] | None
    output: Tensor | None


class HeadBank(nn.Module):
    """The distinct heads of one block: `qkv` [3, heads, width, d], `output` [heads, d, width].

    Where heads have a relative position table, `positions` [heads, entries] holds their columns.
    Members refer to heads by index; a shared head is stored once and sums its members' gradients.
    `untie_` gives every stream its own copies.
    """

    def __init__(self, weights: HeadWeights, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.head_dim = weights.output.shape[-1]
        qkv = torch.stack([weights.query, weights.key, weights.value])
        self.qkv = nn.Parameter(qkv.detach().clone())
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        if all(bias is None for bias in biases):
            self.register_parameter("bias", None)
        else:
            zero = torch.zeros_like(weights.query[..., 0])
            rows = [zero if bias is None else bias for bias in biases]
            self.bias = nn.Parameter(torch.stack(rows).detach().clone())
        # a bias that the host does not have stays zero, also in training
        missing = [i for i, bias in enumerate(biases) if bias is None]
        self._no_bias = missing if len(missing) < 3 else []
        self.output = nn.Parameter(weights.output.detach().clone())
        if weights.positions is None:
            self.register_parameter("positions", None)
        else:
            self.positions = nn.Parameter(weights.positions.detach().clone())
        self._packed: Packed | None = None
        self._frozen: Packed | None = None
        self._key: tuple[object, ...] = ()

    def __len__(self) -> int:
        return self.qkv.shape[1]

    def weights(self, heads: Sequence[int]) -> HeadWeights:
        """Return copies of the given heads' weights."""
        index = torch.tensor(list(heads), dtype=torch.long, device=self.qkv.device)
        q, k, v = self.qkv.detach()[:, index]
        bias = [None] * 3 if self.bias is None else list(self.bias.detach()[:, index])
        positions = None if self.positions is None else self.positions.detach()[index]
        output = self.output.detach()[index]
        return HeadWeights(q, k, v, bias[0], bias[1], bias[2], output, positions)

    def untie_(self) -> None:
        """Give every stream its own copy of its heads, in place."""
        index = torch.tensor([h for heads in self.plan.heads for h in heads], dtype=torch.long)
        index = index.to(self.qkv.device)
        self.qkv = nn.Parameter(self.qkv.detach()[:, index].clone())
        self.output = nn.Parameter(self.output.detach()[index].clone())
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach()[:, index].clone())
        if self.positions is not None:
            self.positions = nn.Parameter(self.positions.detach()[index].clone())
        offsets = [sum(len(h) for h in self.plan.heads[:s]) for s in range(self.plan.streams)]
        heads = tuple(
            tuple(range(start, start + len(h)))
            for start, h in zip(offsets, self.plan.heads, strict=True)
        )
        self.plan = LayerPlan(**{**self.plan.__dict__, "heads": heads})
        self._packed = None

    def packed(self) -> Packed:
        """Return the packed weights: cached without gradients, packed again with gradients.

        A compiled graph also packs again: it cannot check that the cache is up to date.
        """
        if self._frozen is not None:
            return self._frozen
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if learns or torch.compiler.is_compiling():
            return self._pack()
        key = tuple((p.data_ptr(), p._version, p.dtype, p.device) for p in self.parameters())
        if self._packed is None or key != self._key:
            with torch.no_grad():
                self._packed, self._key = self._pack(), key
        return self._packed

    def freeze_(self) -> None:
        """Keep only the packed weights, in place: for an exported graph, which never learns."""
        packed = self.packed()
        # clones: an exported graph must not hold views of larger tensors
        self._frozen = Packed(
            [(s, w.clone(), None if b is None else b.clone()) for s, w, b in packed.projections],
            [(group, columns, weight.clone()) for group, columns, weight in packed.outputs],
            None,
            None,
        )
        for name in ("qkv", "bias", "output"):
            self._parameters.pop(name, None)

    def _pack(self) -> Packed:
        groups = self.plan.groups()
        projections: list[tuple[int, Tensor, Tensor | None]] = []
        biases: Tensor | None = self.bias
        if biases is not None and self._no_bias:
            present = [float(row not in self._no_bias) for row in range(3)]
            biases = biases * torch.tensor(present, device=biases.device).to(biases)[:, None, None]
        for stream, heads in groups:
            weight, bias = self._take(self.qkv, heads), None
            if biases is not None:
                bias = self._take(biases, heads).flatten()
            projections.append((stream, weight.flatten(0, 2), bias))
        outputs = []
        for s, heads in enumerate(self.plan.heads):
            group = self.plan.parents[s] if self.plan.shared else s
            place = {head: i for i, head in enumerate(groups[group][1])}
            ordered = sorted(heads, key=place.__getitem__)
            index = torch.tensor(ordered, dtype=torch.long, device=self.output.device)
            weight = self.output.index_select(0, index).transpose(0, 1).flatten(1)
            outputs.append((group, self._columns([place[h] for h in ordered]), weight))
        qkv = output = None
        sizes = {len(heads) for _, heads in groups}
        if len(sizes) == 1 and sizes != {0}:
            weights, shifts = (_stack(parts) for parts in list(zip(*projections, strict=True))[1:])
            assert weights is not None
            qkv = weights, shifts
            rows = [None] * len(weights) if shifts is None else list(shifts)
            projections = [(p[0], w, b) for p, w, b in zip(projections, weights, rows, strict=True)]
            group_heads = [heads for _, heads in groups]
            if len(group_heads) == len(outputs) and [o[0] for o in outputs] == list(
                range(len(group_heads))
            ):
                output = _stack([o[2] for o in outputs])
                assert output is not None
                outputs = [(o[0], o[1], w) for o, w in zip(outputs, output, strict=True)]
        return Packed(projections, outputs, qkv, output)

    def _take(self, table: Tensor, heads: Sequence[int]) -> Tensor:
        if list(heads) == list(range(table.shape[1])):
            return table  # the bank itself, no copy
        return table.index_select(1, torch.tensor(heads, dtype=torch.long, device=table.device))

    def _columns(self, places: list[int]) -> slice | Tensor:
        if places == list(range(places[0], places[0] + len(places))) if places else True:
            start = places[0] * self.head_dim if places else 0
            return slice(start, start + len(places) * self.head_dim)
        index = torch.tensor(places, device=self.output.device)[:, None] * self.head_dim
        return (index + torch.arange(self.head_dim, device=self.output.device)).flatten()

    def packed_bytes(self) -> int:
        """Bytes of the packed copies, not counting the bank itself."""
        pointers = {self.qkv.data_ptr(), self.output.data_ptr()}
        if self.bias is not None:
            pointers.add(self.bias.data_ptr())
        packed = self.packed()
        tensors = [t for _, w, b in packed.projections for t in (w, b) if t is not None]
        tensors += [weight for _, _, weight in packed.outputs]
        return sum(t.numel() * t.element_size() for t in tensors if t.data_ptr() not in pointers)

    def extra_repr(self) -> str:
        return f"heads={len(self)}, streams={[len(h) for h in self.plan.heads]}"


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    if parts[0] is None:
        return None
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)  # type: ignore[arg-type]
