"""The fused block: members' streams side by side, their heads in one attention call.

Streams are folded into the batch, stream-major: x is [streams * batch, tokens, width]. Nothing
outside this folder sees the folding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .bank import HeadBank, Packed


@dataclass(frozen=True)
class Context:
    """What a forward pass hands to every fused block.

    Attributes:
        mask: Added to (or, boolean, kept in) the scores, [batch or 1, 1, queries or 1, keys].
        causal: Causal attention without a mask tensor.
        tokens: Leading tokens that the readout takes, or None.
        positions: Positions of the readout of each sample [batch], or None.
    """

    mask: Tensor | None
    causal: bool
    tokens: int | None
    positions: Tensor | None


class PerStream(nn.Module):
    """Modules of the streams: one when they agree, one for each stream where they differ."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each stream's module to its part of the folded batch."""
        if len(self.each) == 1:
            return self.each[0](x)
        parts = x.chunk(len(self.each))
        return torch.cat([module(part) for module, part in zip(self.each, parts, strict=True)])

    def untie_(self, streams: int) -> None:
        """Give every stream its own copy, in place."""
        import copy

        if len(self.each) == 1:
            self.each.extend([copy.deepcopy(self.each[0]) for _ in range(streams - 1)])


class OutputBias(nn.Module):
    """The bias of W_O: [1 or streams, width]."""

    def __init__(self, biases: Tensor | None) -> None:
        super().__init__()
        self.value = None if biases is None else nn.Parameter(biases.detach().clone())

    def of(self, stream: int) -> Tensor | None:
        """Return the bias of a stream."""
        if self.value is None:
            return None
        return self.value[stream if len(self.value) > 1 else 0]

    def untie_(self, streams: int) -> None:
        """Give every stream its own copy, in place."""
        if self.value is not None and len(self.value) == 1:
            self.value = nn.Parameter(self.value.detach().repeat(streams, 1))


class FusedBlock(nn.Module):
    """One transformer block for all streams (see `plan.LayerPlan`)."""

    def __init__(
        self,
        bank: HeadBank,
        output_bias: OutputBias,
        *,
        norm: Literal["pre", "post"],
        norm1: PerStream,
        norm2: PerStream,
        mlp: Sequence[nn.Module],
        after_attention: Sequence[PerStream],
        after_mlp: Sequence[PerStream],
        query_norm: PerStream | None,
        key_norm: PerStream | None,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.bank = bank
        self.output_bias = output_bias
        self.norm1, self.norm2 = norm1, norm2
        self.mlp = nn.ModuleList(mlp)
        self.after_attention = nn.ModuleList(after_attention)
        self.after_mlp = nn.ModuleList(after_mlp)
        self.query_norm, self.key_norm = query_norm, key_norm
        self.norm = norm
        self.scale = scale
        self.dropout = dropout

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the block: [inputs * batch, T, d] to [streams * batch, T or readout tokens, d]."""
        plan = self.bank.plan
        if not plan.shared and plan.parents != tuple(range(plan.streams)):
            x = _select(x, plan.parents, plan.inputs)  # every stream gets a copy of its own
            parents = tuple(range(plan.streams))
        else:
            parents = plan.parents
        inputs = max(parents) + 1
        y = self.norm1(x) if self.norm == "pre" else x
        rows = self._rows(context, x.shape[0]) if plan.readout_only else None
        residual = x if rows is None else rows(x)
        attended = self._attention(y, inputs, context, rows)
        for module in self.after_attention:
            attended = module(attended)
        x = _add(attended, residual, parents, inputs)
        if self.norm == "pre":
            return x + self._mlp(self.norm2(x))
        x = self.norm1(x)
        return self.norm2(x + self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        for module in self.mlp:
            x = module(x)
        for module in self.after_mlp:
            x = module(x)
        return x

    def _rows(self, context: Context, folded: int) -> Callable[[Tensor], Tensor] | None:
        """Return what takes the readout tokens, or None when all are read."""
        if context.positions is not None:
            batch = len(context.positions)
            index = context.positions.repeat(folded // batch)
            return lambda x: x[torch.arange(len(x), device=x.device), index][:, None]
        if context.tokens is not None:
            return lambda x: x[:, : context.tokens]
        return None

    def _attention(
        self, y: Tensor, inputs: int, context: Context, rows: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """Return every stream's attention output, W_O and its bias included."""
        packed = self.bank.packed()
        queries = y if rows is None else rows(y)
        batch, length, width = y.shape[0] // inputs, queries.shape[1], y.shape[2]
        mask = query_mask(context, y.shape[1], length if rows is not None else None)
        causal = context.causal and mask is None
        heads = self._heads(y, queries if rows is not None else None, packed, inputs, mask, causal)
        outputs = []
        for stream, (group, columns, weight) in enumerate(packed.outputs):
            bias = self.output_bias.of(stream)
            if weight.shape[1] == 0:
                empty = y.new_zeros(batch, length, width)
                outputs.append(empty if bias is None else empty + bias)
                continue
            part = heads[group]
            part = (
                part[..., columns] if isinstance(columns, slice) else part.index_select(2, columns)
            )
            outputs.append(F.linear(part, weight, bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _heads(
        self,
        y: Tensor,
        queries: Tensor | None,
        packed: Packed,
        inputs: int,
        mask: Tensor | None,
        causal: bool,
    ) -> list[Tensor]:
        """Project and attend: for every group [batch, queries, heads * width]."""
        width = self.bank.head_dim
        streams = y.chunk(inputs)
        query_streams = None if queries is None else queries.chunk(inputs)
        triples = []
        for stream, weight, bias in packed.projections:
            count = weight.shape[0] // 3
            if query_streams is None:
                qkv = F.linear(streams[stream], weight, bias)
                triples.append(qkv.unflatten(-1, (3, -1, width)).unbind(2) if count else None)
                continue
            first, second = (None, None) if bias is None else (bias[:count], bias[count:])
            q = F.linear(query_streams[stream], weight[:count], first)
            kv = F.linear(streams[stream], weight[count:], second)
            if not count:
                triples.append(None)
                continue
            k, v = kv.unflatten(-1, (2, -1, width)).unbind(2)
            triples.append((q.unflatten(-1, (-1, width)), k, v))
        return self._attend(triples, y, mask, causal)

    def _attend(
        self,
        triples: list[tuple[Tensor, ...] | None],
        y: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> list[Tensor]:
        """Attend all groups' heads in one call; q, k, v are [batch, tokens, heads, width]."""
        present = [(g, triple) for g, triple in enumerate(triples) if triple is not None]
        result: list[Tensor] = [y.new_zeros(0)] * len(triples)
        if not present:
            return result
        counts = [triple[0].shape[2] for _, triple in present]
        q, k, v = (
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            for parts in zip(*(triple for _, triple in present), strict=True)
        )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.query_norm is not None:
            q = self._normed(self.query_norm, q, counts)
        if self.key_norm is not None:
            k = self._normed(self.key_norm, k, counts)
        a = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
        )
        flat = a.transpose(1, 2).flatten(2)
        start = 0
        for (group, _), count in zip(present, counts, strict=True):
            stop = start + count * self.bank.head_dim
            result[group] = flat[..., start:stop]
            start = stop
        return result

    def _normed(self, norm: PerStream, x: Tensor, counts: list[int]) -> Tensor:
        if len(norm.each) == 1:
            return norm.each[0](x)
        parts = x.split(counts, dim=1)
        return torch.cat([m(part) for m, part in zip(norm.each, parts, strict=True)], dim=1)

    def untie_(self) -> None:
        """Give every stream its own heads, norms and output bias; the merged MLP stays shared."""
        streams = self.bank.plan.streams
        self.bank.untie_()
        self.output_bias.untie_(streams)
        for part in (self.norm2, *self.after_attention, *self.after_mlp):
            part.untie_(streams)
        # Where siblings read their parent through one norm, it stays one: they share its output.
        if self.bank.plan.inputs == streams or self.norm == "post":
            self.norm1.untie_(streams)


def _select(x: Tensor, parents: Sequence[int], inputs: int) -> Tensor:
    """Copy every stream's input out of the folded inputs."""
    streams = x.unflatten(0, (inputs, -1))
    index = torch.tensor(parents, device=x.device)
    return streams.index_select(0, index).flatten(0, 1)


def _add(attended: Tensor, residual: Tensor, parents: Sequence[int], inputs: int) -> Tensor:
    """Add every stream's own input to what it attended."""
    if tuple(parents) == tuple(range(inputs)):
        return attended + residual
    if inputs == 1:
        return (attended.unflatten(0, (len(parents), -1)) + residual).flatten(0, 1)
    return attended + _select(residual, parents, inputs)


def query_mask(context: Context, keys: int, queries: int | None) -> Tensor | None:
    """Cut the host's mask to the query rows of the readout (`queries` is None for all rows)."""
    mask = context.mask
    if queries is None:
        return mask
    if mask is None:
        if not context.causal:
            return None
        place = torch.arange(keys, device=_device(context))
        rows = place[None, :queries] if context.positions is None else context.positions[:, None]
        return (place <= rows[:, :, None])[:, None]
    if mask.shape[2] == 1:
        return mask
    if context.positions is None:
        return mask[:, :, :queries]
    batch = len(context.positions)
    return mask.expand(batch, -1, -1, -1)[torch.arange(batch), :, context.positions][:, :, None]


def _device(context: Context) -> torch.device | None:
    return None if context.positions is None else context.positions.device


def host_mask(args: Sequence[object], kwargs: dict[str, object], x: Tensor) -> Tensor | None:
    """Find the attention mask in a block's arguments and bring it to four dimensions.

    Hosts pass None, a 4-D mask (eager, sdpa), a 2-D [batch, keys] padding mask (flash) or a 2-D
    [queries, keys] additive one (open_clip).
    """
    mask = kwargs.get("attention_mask", kwargs.get("attn_mask"))
    if mask is None and args and isinstance(args[0], Tensor):
        mask = args[0]
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UnsupportedModelError(
            f"The host hands its blocks a {type(mask).__name__} as attention mask: expected a "
            'tensor. Load it with attn_implementation="sdpa" or "eager".'
        )
    if mask.dim() == 2:
        mask = mask[None, None] if mask.is_floating_point() else mask[:, None, None].bool()
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedModelError(
            f"An attention mask of shape {tuple(mask.shape)} is not supported: expected "
            "[batch, 1, queries, keys], the same for all heads."
        )
    return mask.to(x.dtype) if mask.is_floating_point() else mask
