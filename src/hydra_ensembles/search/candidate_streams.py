"""Run one batch through the blocks: candidate masks are streams that share the layers below.

Streams are folded into the batch, stream-major: x is [streams * batch, tokens, width]. At a layer
the attention of a stream is computed once for all its candidates: zeroing head h only leaves out
W_O's h-block times A_h. The last block runs only for the tokens that the classifier reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import columns, move, split_batch
from ..data.model_runs import device_of
from ..errors import UnsupportedModelError
from ..heads.gates import gate
from ..hosts import HostModel
from ..hosts.attention import AttentionArguments, add_bias, attend, bias_of, rows_of_mask
from ..hosts.block import Block
from ..hosts.block_arguments import read_arguments
from ..hosts.block_calls import (
    BlockCall,
    Inputs,
    capture_calls,
    full_length,
    parameter_names,
    repeat_for_streams,
    run_around,
    stand_ins,
    take_rows,
    why_not_chained,
)
from ..hosts.head_weights import HeadWeights

Branch = tuple[int, Tensor]
"""An output stream of a block: its input stream and its gates [heads]."""


@dataclass(frozen=True)
class Replacement:
    """What replaces heads that are edited and not simply zeroed.

    Attributes:
        donors: Per example, the example whose head outputs it takes [batch], or None.
        means: Mean head outputs [tokens or 1, heads, head width], or None.
    """

    donors: Tensor | None = None
    means: Tensor | None = None

    def of(self, heads: Tensor) -> Tensor:
        """Return what replaces head outputs [batch, tokens, heads, head width]."""
        if self.donors is not None:
            return heads[self.donors.to(heads.device)]
        assert self.means is not None
        return self.means.to(heads).expand_as(heads)


@dataclass
class Call:
    """What a host passes to its blocks for one batch, and what its readout needs.

    Attributes:
        batch: Number of examples.
        layers: Arguments per block, if the host's own code runs them.
        reads: Arguments per block as our own arithmetic reads them, if that runs; a bias per head
            is part of the mask.
        inputs: The host's own inputs, kept only if its readout reads them again.
        positions: Readout positions of the examples [batch], or None.
    """

    batch: int
    layers: tuple[BlockCall, ...] = ()
    reads: tuple[AttentionArguments, ...] = ()
    inputs: Inputs | None = None
    positions: Tensor | None = None
    length: int = 0

    def bytes(self) -> int:
        """Count the bytes of its tensors."""
        values: list[Any] = [self.positions]
        if self.inputs is not None:
            values += [*self.inputs[0], *self.inputs[1].values()]
        shared = {id(v): v for call in self.layers for v in (*call.args, *call.kwargs.values())}
        for read in self.reads:
            angles = () if read.rotary is None else (read.rotary.cos, read.rotary.sin)
            shared.update({id(value): value for value in (read.mask, *angles)})
        return sum(_bytes(value) for value in [*values, *shared.values()])


def _bytes(value: Any) -> int:
    tensors = [leaf for _, leaf in columns(value) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Engine:
    """Runs the blocks of a host for many candidates at once.

    Args:
        host: The host. If its blocks compute what we think, our own arithmetic separates the heads;
            otherwise its own blocks run with gates, once per stream.
        streams: Number of streams to fold into one call.
    """

    def __init__(self, host: HostModel, *, streams: int = 16) -> None:
        self.host = host
        self.streams = streams
        self.own = host.why_not_fused() is None
        self.device = device_of(host.model) or torch.device("cpu")
        self._example: Inputs | None = None

    def enter(self, batch: Any) -> tuple[Tensor, Call]:
        """Run what comes before the blocks; return the hidden states and the blocks' arguments."""
        args, kwargs, _ = split_batch(batch)
        inputs = move(args, self.device), move(kwargs, self.device)
        hidden, call = self._own_call(inputs) if self.own else self._host_call(inputs)
        readout = self.host.readout
        if readout.folds and self._example is None:
            first = {k: v[:1] if isinstance(v, Tensor) else v for k, v in inputs[1].items()}
            self._example = (tuple(v[:1] for v in inputs[0]), first)
        named = {**dict(zip(_names(self.host.model), inputs[0], strict=False)), **inputs[1]}
        call.inputs = None if readout.folds else inputs
        call.positions = None if readout.positions is None else readout.positions(named)
        return hidden, call

    def _own_call(self, inputs: Inputs) -> tuple[Tensor, Call]:
        """Capture the arguments of blocks that our own arithmetic runs."""
        calls: list[BlockCall] = []

        def answer(call: BlockCall) -> Tensor:
            calls.append(call)
            return call.hidden

        with stand_ins(self.host, answer, note=calls.append):
            self.host.model(*inputs[0], **inputs[1])
        x, arithmetic = calls[-1].hidden, self.host.arithmetic
        reads: list[AttentionArguments] = []
        for layer, call in enumerate(calls):
            same = not arithmetic.by_layer and not isinstance(arithmetic.rotary, tuple)
            reads.append(reads[-1] if reads and same else self._read(layer, call))
        return x, Call(len(x), reads=tuple(reads), length=x.shape[1])

    def _read(self, layer: int, call: BlockCall) -> AttentionArguments:
        """Read a block's arguments."""
        block, arithmetic = self.host.blocks[layer], self.host.arithmetic
        site = block.attention
        read = read_arguments(
            parameter_names(block.module)[1:],
            call.args,
            call.kwargs,
            call.hidden,
            rotary=arithmetic.rotary_of(layer),
            heads=site.num_heads if arithmetic.biased else None,
            grid=site.grid,
        )
        causal = site.causal if read.causal is None else read.causal
        mask = read.mask
        if read.bias is not None:
            mask = add_bias(mask, read.bias, causal=causal)
        return AttentionArguments(mask, causal, read.rotary)

    def _host_call(self, inputs: Inputs) -> tuple[Tensor, Call]:
        """Capture the arguments of blocks that the host's own code runs."""
        calls = capture_calls(self.host, self.host.blocks, inputs)
        reason = why_not_chained(calls)
        if reason is not None:
            raise UnsupportedModelError(
                f"{self.host.name} cannot be searched block by block: {reason}. Choose heads by "
                "score_heads() instead."
            )
        x = calls[0].hidden
        # drop the states: a search keeps its own
        layers = tuple(replace(call, hidden=x[:0], output=None) for call in calls)
        return x, Call(len(x), layers=layers, length=x.shape[1])

    def step(
        self,
        layer: int,
        x: Tensor,
        call: Call,
        branches: Sequence[Branch],
        replacement: Replacement | None = None,
    ) -> Tensor:
        """Run one block: every branch with its own gates. Returns [branches * batch, ...]."""
        parents = [parent for parent, _ in branches]
        gates = torch.stack([row for _, row in branches]).to(x)
        if not self.own:
            if replacement is not None:
                raise UnsupportedModelError(
                    f"{self.host.name}: only zero-ablation is possible here, because its blocks "
                    f"cannot be taken apart ({self.host.why_not_fused()})."
                )
            streams, outputs = x.unflatten(0, (-1, call.batch)), []
            module = self.host.blocks[layer].module
            for parent, row in zip(parents, gates, strict=True):
                only: list[Tensor | None] = [None] * len(self.host)
                only[layer] = None if bool((row == 1).all()) else row
                with gate(self.host, only):  # the host's own block, with its own arguments
                    outputs.append(call.layers[layer].run(module, streams[parent]))
            return torch.cat(outputs)
        block = self.host.blocks[layer]
        rows = self._rows(call) if layer == len(self.host) - 1 else None
        heads = self.heads(layer, x, call)
        residual = (x if rows is None else rows(x)).unflatten(0, (-1, call.batch))
        attended = _attended(block, heads.unflatten(0, (-1, call.batch)), parents, gates)
        if replacement is not None:
            other = replacement.of(heads)[None]
            bias = block.attention.output_bias
            extra = _attended(block, other, [0] * len(parents), 1.0 - gates)
            attended = attended + (extra if bias is None else extra - bias)
        index = torch.tensor(parents, device=x.device)
        residual = residual.expand_as(attended) if len(residual) == 1 else residual[index]
        # modules see three dimensions, as in the host
        return block.finish(residual.flatten(0, 1), attended.flatten(0, 1))

    def heads(self, layer: int, x: Tensor, call: Call) -> Tensor:
        """Compute all head outputs A_h of a layer: [streams * batch, queries, heads, width]."""
        block, read = self.host.blocks[layer], call.reads[layer]
        site, causal = block.attention, bool(read.causal)
        rows = self._rows(call) if layer == len(self.host) - 1 else None
        streams = len(x) // call.batch
        y = block.norm1(x) if block.family.norm == "pre" else x  # type: ignore[misc]
        weights = site.weights()
        queries = y if rows is None else rows(y)
        mask = repeat_for_streams(read.mask, streams, call.batch)
        if site.table is not None and weights.positions is not None:
            index = site.table.index
            assert index is not None
            mask = add_bias(mask, bias_of(weights.positions, index[None]), causal=causal)
        if rows is not None:
            mask = rows_of_mask(
                mask,
                causal=causal,
                keys=y.shape[1],
                queries=queries.shape[1],
                positions=None if call.positions is None else call.positions.repeat(streams),
                device=x.device,
            )
        q = weights.queries(queries)  # [batch, queries, heads, width]
        # whether keys are linear in the states, and scores in the keys
        plain = site.head_norms == (None, None) and read.rotary is None and site.softcap is None
        if rows is not None and plain and 4 * q.shape[1] * q.shape[2] <= y.shape[2]:
            return _few_queries(q.transpose(1, 2), y, weights, mask, site.scale)
        return attend(
            q,
            weights.keys(y),
            weights.values(y),
            mask=mask,
            causal=causal,
            rotary=read.rotary,
            rows=rows,
            norms=site.head_norms,
            scale=site.scale,
            softcap=site.softcap,
        )

    def _rows(self, call: Call) -> Callable[[Tensor], Tensor] | None:
        """Return a function that selects the tokens the classifier reads, or None for all."""
        return take_rows(self.host.readout.tokens, call.positions)

    def read(self, x: Tensor, call: Call) -> Tensor:
        """Read out the streams with the host's own head: logits [batch, streams, class]."""
        if self.host.readout.folds:
            assert self._example is not None
            output = self.host.read(run_around(self.host, self._example, lambda _: x))
            return output.unflatten(0, (-1, call.batch)).transpose(0, 1)
        assert call.inputs is not None
        logits = []
        for stream in x.unflatten(0, (-1, call.batch)):
            states = full_length(stream, call.positions, call.length)
            logits.append(
                self.host.read(run_around(self.host, call.inputs, partial(lambda s, _: s, states)))
            )
        return torch.stack(logits, 1)


def _few_queries(
    q: Tensor, y: Tensor, weights: HeadWeights, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attend from few queries [batch, heads, queries, head width] to tokens [batch, T, d].

    Neither keys nor values are projected: q.(W_K y_t + b_K) is (W_K^T q).y_t plus a constant that
    softmax drops, and sum_t a_t (W_V y_t + b_V) is W_V (sum_t a_t y_t) + b_V.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    looked = torch.einsum("bhqe,hed->bhqd", q * scale, weights.key)
    scores = torch.bmm(looked.flatten(1, 2), y.transpose(1, 2)).view(*q.shape[:3], -1)
    if mask is not None:
        floats = mask.is_floating_point()
        scores = scores + mask if floats else scores.masked_fill(~mask, float("-inf"))
    attended = torch.bmm(scores.softmax(-1).flatten(1, 2), y).view_as(looked)
    values = torch.einsum("bhqd,hed->bqhe", attended, weights.value)
    return values if weights.value_bias is None else values + weights.value_bias


def _attended(block: Block, heads: Tensor, parents: Sequence[int], gates: Tensor) -> Tensor:
    """Return every branch's attention output, W_O and bias included: [branches, batch, T, d].

    Args:
        heads: [streams, batch, T, heads, head width].
        gates: [branches, heads].
    """
    site = block.attention
    output = site.weights().output  # [heads, d, head width]
    if len(parents) > 2 * len(heads):
        # many candidates of few streams: compute each head's part of the output once, then sum
        result = heads.new_empty(len(parents), *heads.shape[1:3], output.shape[1])
        for stream, mine in enumerate(heads):
            places = [i for i, parent in enumerate(parents) if parent == stream]
            if places:
                by_head = mine.flatten(0, 1).transpose(0, 1)  # [heads, batch * T, head width]
                parts = torch.bmm(by_head, output.transpose(1, 2)).flatten(1)
                result[places] = (gates[places] @ parts).unflatten(1, result.shape[1:])
        bias = site.output_bias
        return result if bias is None else result.add_(bias)
    index = torch.tensor(parents, device=heads.device)
    chosen = heads if list(parents) == list(range(len(heads))) else heads[index]
    gated = chosen * gates[:, None, None, :, None]
    return F.linear(gated.flatten(-2), output.transpose(0, 1).flatten(1), site.output_bias)


def _names(model: nn.Module) -> list[str]:
    import inspect

    return list(inspect.signature(type(model).forward).parameters)[1:]
