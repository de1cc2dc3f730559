"""The fused block: members' streams side by side, their heads in one attention call.

Streams are folded into the batch, stream-major: x is [streams * batch, tokens, width]. Nothing
outside this folder sees the folding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..heads.stream_plan import LayerPlan
from ..hosts.attention import Rotary, attend, bias_of, rows_of_mask
from ..hosts.block_calls import take_rows
from .head_bank import HeadBank, Packed
from .linear_readout import FeatureCollector
from .streams import OutputBias, PerStream, add_residual, of_stream, select_streams, streams_of

Rows = Callable[[Tensor], Tensor]
"""Selects the tokens that the classifier reads."""

BiasFor = Callable[[Sequence[int]], Tensor]
"""Returns the attention bias of some of a bank's heads."""

CACHED_BYTES = 6 * 2**20
"""Size of an MLP's hidden layer that fits a CPU's caches (measured: 4 to 8 MiB are best)."""


@dataclass(frozen=True)
class Context:
    """What a forward pass gives to every fused block.

    Attributes:
        mask: Added to the scores, or boolean (True: attend), [batch or 1, 1, queries or 1, keys].
        causal: Causal attention without a mask tensor.
        tokens: Number of leading tokens that the readout takes, or None.
        positions: Position of each sample's readout [batch], or None.
        rotary: Angles by which queries and keys are rotated, or None.
        bias: Added to the scores of the host's heads [batch or 1, heads, queries, keys], or None.
        features: Takes the features of linear readouts, or None.
    """

    mask: Tensor | None
    causal: bool
    tokens: int | None
    positions: Tensor | None
    rotary: Rotary | None = None
    bias: Tensor | None = None
    features: FeatureCollector | None = None


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
        softcap: float | None = None,
        places: Sequence[int] = (),
        index: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.bank = bank
        self.places = tuple(places)  # the bank's heads by their place in the host, if needed
        # index into the heads' relative position tables, [tokens, tokens]
        self.register_buffer("index", index, persistent=False)
        self.output_bias = output_bias
        self.norm1, self.norm2 = norm1, norm2
        self.mlp = nn.ModuleList(mlp)
        self.after_attention = nn.ModuleList(after_attention)
        self.after_mlp = nn.ModuleList(after_mlp)
        self.query_norm, self.key_norm = query_norm, key_norm
        self.norm = norm
        self.scale = scale
        self.dropout = dropout
        self.softcap = softcap
        self.grouped: bool | None = (
            None  # one batched product for all groups; None: except on a CPU
        )
        shapes = [p.shape for p in self.mlp.parameters() if p.dim() == 2]
        widest = max((max(shape) for shape in shapes), default=0)
        self._widening = widest / bank.qkv.shape[-1]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the block: [inputs * batch, T, d] to [streams * batch, T or readout tokens, d]."""
        plan = self.bank.plan
        if not plan.shared and plan.parents != tuple(range(plan.streams)):
            x = select_streams(x, plan.parents, plan.inputs)  # every stream gets its own copy
            parents = tuple(range(plan.streams))
        else:
            parents = plan.parents
        inputs = max(parents) + 1
        y = self.norm1(x) if self.norm == "pre" else x
        rows = take_rows(context.tokens, context.positions) if plan.readout_only else None
        residual = x if rows is None else rows(x)
        attended = self._attention(y, inputs, context, rows)
        for module in self.after_attention:
            attended = module(attended)
        x = add_residual(attended, residual, parents, inputs)
        x = x if self.norm == "pre" else self.norm1(x)
        if context.features is not None:
            context.features.enter(x, plan.streams)
        return self._by_rows(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.norm == "pre":
            return x + self._mlp(self.norm2(x))
        return self.norm2(x + self._mlp(x))

    def _by_rows(self, x: Tensor) -> Tensor:
        """Run the feed-forward part; on a CPU, in chunks of rows that fit its cache.

        All members' rows together would make the MLP's hidden layer M times as large as the
        host's, which costs more in memory traffic than the rows cost in arithmetic.
        """
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu"
        inside = [m for part in (self.norm2, *self.mlp, *self.after_mlp) for m in part.modules()]
        apart = any(isinstance(module, PerStream) and len(module.each) > 1 for module in inside)
        hidden = x.numel() * x.element_size() * self._widening
        chunks = 1 if plain or apart else math.ceil(hidden / CACHED_BYTES)
        if chunks <= 1:
            return self._feed_forward(x)
        rows = x.flatten(0, 1)[None]
        result = torch.empty_like(rows)
        for source, target in zip(rows.chunk(chunks, 1), result.chunk(chunks, 1), strict=True):
            target.copy_(self._feed_forward(source))
        return result.view_as(x)

    def _mlp(self, x: Tensor) -> Tensor:
        for module in self.mlp:
            x = module(x)
        for module in self.after_mlp:
            x = module(x)
        return x

    def _attention(self, y: Tensor, inputs: int, context: Context, rows: Rows | None) -> Tensor:
        """Return every stream's attention output, W_O and its bias included."""
        packed = self.bank.packed()
        queries = y if rows is None else rows(y)
        batch, length = y.shape[0] // inputs, queries.shape[1]
        mask = context.mask
        if rows is not None:
            mask = rows_of_mask(
                mask,
                causal=context.causal,
                keys=y.shape[1],
                queries=length,
                positions=context.positions,
                device=y.device,
            )
        bias_for = self._biases(context, None if rows is None else length)
        grouped = y.device.type != "cpu" if self.grouped is None else self.grouped
        grouped = grouped and bias_for is None  # groups of heads have their own biases
        attend_group = partial(
            attend,
            mask=mask,
            causal=context.causal,
            rotary=context.rotary,
            rows=rows,
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        few = None if rows is None else queries
        if grouped and packed.qkv is not None:
            heads = self._attend_grouped(y, few, packed, inputs, mask, attend_group)
        else:
            heads = self._attend_each(y, few, packed, inputs, attend_group, bias_for)
        if grouped and packed.output is not None and len(heads) == len(packed.outputs):
            return self._project_grouped(heads, packed.output).view(-1, length, y.shape[2])
        outputs = []
        for stream, (group, columns, weight) in enumerate(packed.outputs):
            bias = self.output_bias.of(stream)
            if weight.shape[1] == 0:
                empty = y.new_zeros(batch * length, y.shape[2])
                outputs.append(empty if bias is None else empty + bias)
                continue
            part = heads[group]  # [batch * queries, heads * width]: slicing columns needs no copy
            part = part[:, columns] if isinstance(columns, slice) else part.index_select(1, columns)
            outputs.append(F.linear(part, weight, bias))
        result = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return result.view(-1, length, y.shape[2])

    def _biases(self, context: Context, queries: int | None) -> BiasFor | None:
        """Return a function from heads to their bias [batch or 1, heads, queries, keys], or None.

        Args:
            context: The context of the forward pass.
            queries: Number of query rows that are read, or None for all.
        """
        index: Any = self.index
        if context.bias is None and index is None:
            return None

        def rows(table: Tensor) -> Tensor:
            if queries is None:
                return table
            cut = rows_of_mask(
                table,
                causal=False,
                keys=table.shape[-1],
                queries=queries,
                positions=context.positions,
                device=table.device,
            )
            assert cut is not None
            return cut

        passed = None if context.bias is None else rows(context.bias)
        looked_up = None if index is None else rows(index[None, None])[:, 0]

        def bias_for(heads: Sequence[int]) -> Tensor:
            positional = None
            if looked_up is not None:
                positional = bias_of(self.bank.positions[list(heads)], looked_up)
            if passed is None:
                assert positional is not None
                return positional
            shared = passed[:, [self.places[head] for head in heads]]
            return shared if positional is None else shared + positional

        return bias_for

    def _attend_each(
        self,
        y: Tensor,
        queries: Tensor | None,
        packed: Packed,
        inputs: int,
        attend_group: Callable[..., Tensor],
        bias_for: BiasFor | None,
    ) -> list[Tensor]:
        """Project and attend group by group; per group [batch * queries, heads * width].

        Separate products need no copies; on a CPU this is faster.
        """
        streams = streams_of(y, inputs)
        query_streams = None if queries is None else streams_of(queries, inputs)
        result = []
        for group, (stream, weight, bias) in enumerate(packed.projections):
            count = weight.shape[0] // 3
            if not count:
                result.append(y.new_zeros(0))
                continue
            if query_streams is None:
                qkv = F.linear(streams[stream], weight, bias)
                q, k, v = qkv.unflatten(-1, (3, -1, self.bank.head_dim)).unbind(2)
            else:
                first, second = (None, None) if bias is None else (bias[:count], bias[count:])
                q = F.linear(query_streams[stream], weight[:count], first)
                q = q.unflatten(-1, (-1, self.bank.head_dim))
                kv = F.linear(streams[stream], weight[count:], second)
                k, v = kv.unflatten(-1, (2, -1, self.bank.head_dim)).unbind(2)
            norms = [
                None if norm is None else norm.of(group)
                for norm in (self.query_norm, self.key_norm)
            ]
            head_bias = None if bias_for is None else bias_for(self.bank.plan.groups()[group][1])
            attended = attend_group(q, k, v, bias=head_bias, norms=norms)
            result.append(attended.flatten(2).flatten(0, 1))
        return result

    def _attend_grouped(
        self,
        y: Tensor,
        queries: Tensor | None,
        packed: Packed,
        inputs: int,
        mask: Tensor | None,
        attend_group: Callable[..., Tensor],
    ) -> list[Tensor]:
        """Project all groups in one batched product and attend them in one call.

        Only for groups of equal size; a GPU then runs a few large kernels.
        """
        assert packed.qkv is not None
        weight, bias = packed.qkv  # [groups, 3 * heads * width, d]
        count, width = weight.shape[1] // 3, self.bank.head_dim

        def project(x: Tensor, start: int, stop: int) -> Tensor:
            x = x.unflatten(0, (inputs, -1))
            shape = x.shape[:-1]
            rows, columns = x.flatten(1, 2), weight[:, start:stop].transpose(1, 2)
            if bias is None:
                return torch.bmm(rows, columns).view(*shape, -1).flatten(0, 1)
            shift = bias[:, None, start:stop]
            return torch.baddbmm(shift, rows, columns).view(*shape, -1).flatten(0, 1)

        if queries is None:
            q, k, v = project(y, 0, 3 * count).unflatten(-1, (3, -1, width)).unbind(2)
        else:
            q = project(queries, 0, count).unflatten(-1, (-1, width))
            k, v = project(y, count, 3 * count).unflatten(-1, (2, -1, width)).unbind(2)
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat(inputs, 1, 1, 1)
        norms = (self.query_norm, self.key_norm)
        attended = attend_group(q, k, v, mask=mask, norms=norms).flatten(2)
        return list(attended.unflatten(0, (inputs, -1)).flatten(1, 2).unbind(0))

    def _project_grouped(self, heads: list[Tensor], weight: Tensor) -> Tensor:
        """Apply W_O of all streams, [streams, d, heads * width], in one batched product."""
        rows, columns = torch.stack(heads), weight.transpose(1, 2)
        bias = self.output_bias.value
        return (
            torch.bmm(rows, columns)
            if bias is None
            else torch.baddbmm(bias[:, None], rows, columns)
        )

    @property
    def plan(self) -> LayerPlan:
        """Which streams run in this block, with which heads."""
        return self.bank.plan

    def packed_bytes(self) -> int:
        """Bytes of the packed copies, not counting the bank itself."""
        return self.bank.packed_bytes()

    def untie_(self, *, mlps: bool = False) -> None:
        """Give every stream its own heads, norms and output bias; with `mlps`, its own MLP."""
        streams = self.bank.plan.streams
        if self.places:
            heads = [head for kept in self.bank.plan.heads for head in kept]
            self.places = tuple(self.places[head] for head in heads)
        self.bank.untie_()
        self.output_bias.untie_(streams)
        for part in (self.norm2, *self.after_attention, *self.after_mlp):
            part.untie_(streams)
        # siblings that read their parent through one norm keep sharing it, and its output
        if self.bank.plan.inputs == streams or self.norm == "post":
            self.norm1.untie_(streams)
        if mlps:
            owned = [copy.deepcopy(self.mlp_of(stream)) for stream in range(streams)]
            self.mlp = nn.ModuleList(PerStream(modules) for modules in zip(*owned, strict=True))

    def copies(self) -> dict[str, int]:
        """Count the copies of every part, by `<layer>.<name>`."""
        parts = {name: getattr(self, name) for name in ("norm1", "norm2", "query_norm", "key_norm")}
        for name in ("after_attention", "after_mlp", "mlp"):
            parts |= {f"{name}.{i}": part for i, part in enumerate(getattr(self, name))}
        counts = {
            f"{name}.{inner}".rstrip("."): len(module.each)
            for name, part in parts.items()
            if part is not None
            for inner, module in part.named_modules()
            if isinstance(module, PerStream)
        }
        if self.output_bias.value is not None:
            counts["output_bias"] = len(self.output_bias.value)
        return {f"{self.plan.layer}.{name}": count for name, count in counts.items()}

    def mlp_of(self, stream: int) -> list[nn.Module]:
        """Return the modules of a stream's MLP."""
        return [of_stream(part, stream) for part in self.mlp]
