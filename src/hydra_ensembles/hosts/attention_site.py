"""One attention layer of a host model: its projections seen head by head, and their removal."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .attention import Grid, find_table
from .families import Family, first
from .multihead_attention import open_attention_
from .reasons import describe_parameters

_HEAD_WIDTH = ("head_dim", "attention_head_size")
_HEAD_NUMBER = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "h",
    "heads",
    "num_head",
    "nhead",
)
_DROPOUT = ("attention_dropout", "attn_drop", "attn_dropout", "dropout")


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one attention layer, head by head.

    Shapes: `query`, `key`, `value` [heads, head width, model width], their biases
    [heads, head width] or None; `output` [heads, model width, head width]; `positions`
    [heads, entries], the heads' columns of a table by relative position (see `relative`), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output: Tensor
    positions: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """Project states [batch, tokens, model width] to [batch, tokens, heads, head width]."""
        return _by_heads(x, self.query, self.query_bias)

    def keys(self, x: Tensor) -> Tensor:
        """Project states to keys, like `queries`."""
        return _by_heads(x, self.key, self.key_bias)

    def values(self, x: Tensor) -> Tensor:
        """Project states to values, like `queries`."""
        return _by_heads(x, self.value, self.value_bias)

    def spread(self, places: Sequence[int], number: int) -> HeadWeights:
        """Put these heads at their places among a number of heads; the others are zero."""

        def whole(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            result = part.new_zeros(number, *part.shape[1:])
            result[torch.tensor(places, dtype=torch.long, device=part.device)] = part
            return result

        parts = (whole(getattr(self, name)) for name in self.__dataclass_fields__)
        return HeadWeights(*parts)  # type: ignore[arg-type]


def _by_heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = None if bias is None else bias.flatten()
    return F.linear(x, weight.flatten(0, 1), flat).unflatten(-1, (-1, weight.shape[1]))


def linear_weight(module: nn.Module) -> Tensor:
    """Return a projection's weight as [out, in], also for transposed `Conv1D` layers."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if type(module).__name__ == "Conv1D" else weight


class AttentionSite:
    """Where one attention layer's heads are.

    Attributes:
        module: The module whose forward does the attention.
        output: The output projection, at whose input a head is gated.
        head_dim, num_heads, kv_heads, scale, causal: Its geometry.
        softcap: What its scores are bent to stay below, or None.
        table: Its table by relative position, or None.
    """

    def __init__(self, layer: int, block: nn.Module, family: Family) -> None:
        parts = family.resolve(block)
        assert parts is not None
        self.layer = layer
        self.family = family
        self.output = parts["output"]
        self.packed = parts.get("packed")
        self.query = parts.get("query")
        self.key = parts.get("key")
        self.value = parts.get("value")
        self.module = self._owner(block)
        self.norm_after = self._norm_after(block)
        self.counts_itself = True  # whether the attention module itself tells its heads
        self.head_dim = self._head_dim(block)
        self.scale = float(
            getattr(self.module, "scaling", None)
            or getattr(self.module, "scale", None)
            or self.head_dim**-0.5
        )
        if family.scales_queries:
            self.scale *= self.head_dim**-0.5
        self.softcap: float | None = getattr(self.module, "attn_logit_softcapping", None)
        self.table = find_table(block)
        self.causal = bool(getattr(self.module, "is_causal", False))

    def _owner(self, block: nn.Module) -> nn.Module:
        if isinstance(self.packed, nn.MultiheadAttention):
            return self.packed
        inner = self.packed or self.query or self.output
        for module in block.modules():
            if any(child is inner for child in module.children()):
                return module
        raise UnsupportedModelError(f"Layer {self.layer}: the attention module was not found.")

    def _norm_after(self, block: nn.Module) -> nn.Module | None:
        """Return the post-norm that the attention module itself applies to the sum (ALBERT)."""
        norm = first(block, self.family.norm1) if self.family.norm == "post" else None
        return norm if any(part is norm for part in self.module.modules()) else None

    def _head_dim(self, block: nn.Module) -> int:
        """Find the width of a head's output, which is its share of W_O's columns."""
        columns = linear_weight(self.output).shape[1]
        number = _first_number(self.module, _HEAD_NUMBER)
        width = _first_number(self.module, _HEAD_WIDTH)
        if width is not None and (number is None or number * width == columns or not columns):
            return width
        if number is not None and columns % number == 0:  # values may be wider than queries
            return columns // number
        for place in (getattr(self.module, "config", None), block, getattr(block, "config", None)):
            number = _first_number(place, _HEAD_NUMBER)
            if number is not None and columns % number == 0:
                self.counts_itself = False
                return columns // number
        raise UnsupportedModelError(
            f"Layer {self.layer}: {type(self.module).__name__} tells neither its head width "
            f"({', '.join(_HEAD_WIDTH)}) nor its number of heads ({', '.join(_HEAD_NUMBER)}). "
            "Set one of these attributes on the attention module."
        )

    @property
    def num_heads(self) -> int:
        """Number of heads that are there now."""
        return linear_weight(self.output).shape[1] // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: fewer than heads with grouped queries."""
        if self.key is not None:
            return linear_weight(self.key).shape[0] // self.head_dim
        if self.packed is None or isinstance(self.packed, nn.MultiheadAttention):
            return self.num_heads
        rows = linear_weight(self.packed).shape[0] // self.head_dim
        return (rows - self.num_heads) // 2

    @property
    def dropout(self) -> float:
        """Dropout of the attention weights in training."""
        for name in _DROPOUT:
            value = getattr(self.module, name, None)
            if isinstance(value, nn.Dropout):
                return float(value.p)
            if isinstance(value, float):
                return value
        return 0.0

    @property
    def grid(self) -> Grid | None:
        """The pictures that its table by relative position is made for, where it has one."""
        return None if self.table is None else self.table.grid

    @property
    def output_bias(self) -> Tensor | None:
        """Bias of the output projection; it stays when heads go."""
        return self.output.bias  # type: ignore[return-value]

    @property
    def head_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Norms of queries and keys within a head, where there are any."""
        found = [getattr(self.module, name, None) for name in ("q_norm", "k_norm")]
        return tuple(None if isinstance(n, nn.Identity) else n for n in found)  # type: ignore[return-value]

    def unknown_parameters(self) -> list[str]:
        """Name the attention's parameters that are no projection: they cannot be cut by heads."""
        known = {id(p) for part in self._parts() for p in part.parameters()}
        known |= {id(p) for norm in self.head_norms if norm is not None for p in norm.parameters()}
        if self.norm_after is not None:
            known |= {id(p) for p in self.norm_after.parameters()}
        known |= {id(bias) for bias in self._bare_biases}
        known |= {id(self.table.weight)} if self.table is not None else set()
        return [name for name, p in self.module.named_parameters() if id(p) not in known]

    def _parts(self) -> list[nn.Module]:
        parts = (self.packed, self.query, self.key, self.value, self.output)
        return [part for part in parts if part is not None]

    def weights(self) -> HeadWeights:
        """Return views of the weights by head (see `HeadWeights`).

        Raises:
            UnsupportedModelError: When queries, keys and values are not made by one linear each, or
                by one for all three.
        """
        reason = self.why_no_weights()
        if reason is not None:
            raise UnsupportedModelError(f"Layer {self.layer}: {reason}.")
        if self.packed is None:
            assert self.query is not None and self.key is not None and self.value is not None
            weights = [linear_weight(m) for m in (self.query, self.key, self.value)]
            biases: list[Any] = [m.bias for m in (self.query, self.key, self.value)]
        else:
            weight, bias = self._packed_parameters()
            sizes = [n * self.head_dim for n in (self.num_heads, self.kv_heads, self.kv_heads)]
            weights = list(weight.split(sizes))
            biases = [None] * 3 if bias is None else list(bias.split(sizes))
            if self._bare_biases:
                biases[0], biases[2] = self._bare_biases
        q, k, v = (w.unflatten(0, (-1, self.head_dim)) for w in weights)
        bq, bk, bv = (None if b is None else b.unflatten(0, (-1, self.head_dim)) for b in biases)
        if self.kv_heads != self.num_heads:
            group = self.num_heads // self.kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            bk = None if bk is None else bk.repeat_interleave(group, 0)
            bv = None if bv is None else bv.repeat_interleave(group, 0)
        output = linear_weight(self.output).unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        positions = None if self.table is None else self.table.weight.t()[: self.num_heads]
        return HeadWeights(q, k, v, bq, bk, bv, output, positions)

    @property
    def _bare_biases(self) -> tuple[Tensor, ...]:
        """The biases of queries and values that timm keeps beside one linear for all three."""
        if self.packed is None or isinstance(self.packed, nn.MultiheadAttention):
            return ()
        found = [getattr(self.module, name, None) for name in ("q_bias", "v_bias")]
        return tuple(found) if all(isinstance(bias, nn.Parameter) for bias in found) else ()  # type: ignore[arg-type]

    def _put_bare_biases_(self, query: Tensor, value: Tensor) -> None:
        """Give queries and values other bare biases; keys have none, which is kept as zeros."""
        for name, bias in (("q_bias", query), ("v_bias", value)):
            old: Any = getattr(self.module, name)
            new = nn.Parameter(bias.detach().clone().contiguous(), requires_grad=old.requires_grad)
            setattr(self.module, name, new)
        zeros: Any = getattr(self.module, "k_bias", None)
        if isinstance(zeros, Tensor):
            self.module.k_bias = torch.zeros_like(value)

    def _packed_parameters(self) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.packed, nn.MultiheadAttention):
            return self.packed.in_proj_weight, self.packed.in_proj_bias
        assert self.packed is not None
        return linear_weight(self.packed), self.packed.bias  # type: ignore[return-value]

    def why_no_weights(self) -> str | None:
        """Say why the weights cannot be seen head by head, or None."""
        parts = [part for part in (self.query, self.key, self.value) if part is not None]
        if self.packed is None and len(parts) < 3:
            return "its queries, keys or values are not made by one linear of their own"
        heads, groups = self.num_heads, self.kv_heads
        rows = [self._packed_parameters()[0]] if self.packed is not None else []
        sizes = [heads + 2 * groups] if rows else [heads, groups, groups]
        weights = rows or [linear_weight(part) for part in parts]
        fits = [len(w) == size * self.head_dim for w, size in zip(weights, sizes, strict=True)]
        grouped = groups > 0 and heads % groups == 0
        if not all(fits) or not (grouped or heads == groups == 0):  # an emptied layer has none
            return (
                f"its queries, keys and values have {[len(w) for w in weights]} rows, which are no "
                f"heads of width {self.head_dim}"
            )
        return None

    def why_not_removable(self) -> str | None:
        """Say why heads cannot be removed physically here, or None."""
        reason = self.why_not_taken_apart()
        if reason is None and not self.counts_itself:
            return "its number of heads is fixed in its config"
        return reason

    def why_not_taken_apart(self) -> str | None:
        """Say why the attention's parameters are not all seen head by head, or None."""
        reason = self.why_no_weights()
        if reason is not None:
            return reason
        if self.table is not None and self.num_heads not in (0, self.table.weight.shape[1]):
            return "its table of relative positions has not one column for each head"
        unknown = self.unknown_parameters()
        if unknown:
            words = describe_parameters(unknown, of_attention=True)
            return f"its attention also has {words}, which cannot be cut by heads"
        return None

    def keep_(self, heads: list[int]) -> None:
        """Remove every head but these, physically, in place."""
        reason = self.why_not_removable()
        if reason is not None:
            raise UnsupportedModelError(
                f"Heads of layer {self.layer} cannot be removed: {reason}. Use gate() instead."
            )
        self.cut_(heads)

    def cut_(self, heads: list[int]) -> None:
        """Remove every head but these, in place, whether or not the attention's code allows it."""
        kv_heads = self._kept_groups(heads)
        rows, columns = self._rows(heads), self._rows(heads)
        if self.packed is not None:
            self._cut_packed(rows, self._rows(kv_heads))
        else:
            assert self.query is not None and self.key is not None and self.value is not None
            _cut(self.query, rows, 0)
            _cut(self.key, self._rows(kv_heads), 0)
            _cut(self.value, self._rows(kv_heads), 0)
        _cut(self.output, columns, 1)
        if self.table is not None:
            self.table.cut_(heads)
        self._note_heads(len(heads))

    def _kept_groups(self, heads: list[int]) -> list[int]:
        group = self.num_heads // self.kv_heads
        if group == 1:
            return heads
        kept = sorted({head // group for head in heads})
        broken = [g for g in kept if sum(head // group == g for head in heads) != group]
        if broken:
            raise UnsupportedModelError(
                f"Layer {self.layer} has {self.num_heads} query heads on {self.kv_heads} key "
                f"heads: group {broken[0]} (heads {broken[0] * group} to "
                f"{(broken[0] + 1) * group - 1}) would be broken. Keep or remove whole groups, or "
                "use gate()."
            )
        return kept

    def _rows(self, heads: list[int]) -> Tensor:
        index = torch.tensor(heads, dtype=torch.long)[:, None] * self.head_dim
        return (index + torch.arange(self.head_dim)).flatten()

    def _cut_packed(self, rows: Tensor, kv_rows: Tensor) -> None:
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        triple = torch.cat([rows, kv_rows + width, kv_rows + width + kv_width])
        assert self.packed is not None
        if isinstance(self.packed, nn.MultiheadAttention):
            weight, bias = self._packed_parameters()
            index = triple.to(weight.device)
            _set_linear(self.packed, weight[index], None if bias is None else bias[index])
        else:
            if self._bare_biases:
                query, value = self._bare_biases
                index, other = rows.to(query.device), kv_rows.to(value.device)
                self._put_bare_biases_(query[index], value[other])
            _cut(self.packed, triple, 0)

    def replace_(self, weights: HeadWeights, output_bias: Tensor | None) -> None:
        """Put other heads, any number of them, in the place of all heads, in place."""
        self.module.__dict__.pop("forward", None)  # a layer that was empty attends again
        rows = [weights.query, weights.key, weights.value]
        biases = [weights.query_bias, weights.key_bias, weights.value_bias]
        flat = [row.flatten(0, 1) for row in rows]
        flat_biases = [None if bias is None else bias.flatten() for bias in biases]
        if self.packed is None:
            for part, weight, bias in zip(
                (self.query, self.key, self.value), flat, flat_biases, strict=True
            ):
                assert part is not None
                _set_linear(part, weight, bias)
        else:
            bare = bool(self._bare_biases)
            whole = None if bare or flat_biases[0] is None else torch.cat(flat_biases)  # type: ignore[arg-type]
            _set_linear(self.packed, torch.cat(flat), whole)
            if bare:
                self._put_bare_biases_(flat_biases[0], flat_biases[2])  # type: ignore[arg-type]
        if self.table is not None and weights.positions is not None:
            self.table.put_(weights.positions.t())
        _set_linear(self.output, weights.output.transpose(0, 1).flatten(1), output_bias)
        self._note_heads(len(weights.query))
        for name, value in (("num_key_value_groups", 1), ("num_key_value_heads", len(weights.key))):
            if isinstance(getattr(self.module, name, None), int):  # every query has its own key
                setattr(self.module, name, value)

    def grow_(self, number: int) -> None:
        """Make room for a number of heads, without storage (for counting), in place."""
        if self.kv_heads != self.num_heads:
            self._grow_groups_(number)
            return
        old = self.weights()

        def room(like: Tensor | None) -> Tensor | None:
            if like is None:
                return None
            return torch.empty(number, *like.shape[1:], dtype=like.dtype, device="meta")

        names = HeadWeights.__dataclass_fields__
        weights = HeadWeights(*(room(getattr(old, name)) for name in names))  # type: ignore[arg-type]
        self.replace_(weights, self.output_bias)

    def _grow_groups_(self, number: int) -> None:
        """Make room for heads on fewer keys: their groups stay as large as they are."""
        keys = number // (self.num_heads // self.kv_heads)

        def room(part: nn.Module, rows: int | None, columns: int | None) -> None:
            weight = linear_weight(part)
            shape = (rows or weight.shape[0], columns or weight.shape[1])
            bias = part.bias
            if bias is not None and rows is not None:
                bias = bias.new_empty(rows, device="meta")  # type: ignore[operator]
            _set_linear(part, weight.new_empty(shape, device="meta"), bias)  # type: ignore[arg-type]

        if self.packed is not None:
            room(self.packed, (number + 2 * keys) * self.head_dim, None)
        else:
            assert self.query is not None and self.key is not None and self.value is not None
            for part, count in ((self.query, number), (self.key, keys), (self.value, keys)):
                room(part, count * self.head_dim, None)
        room(self.output, None, number * self.head_dim)
        self._note_heads(number)

    def _note_heads(self, number: int) -> None:
        """Tell the attention module how many heads it has now."""
        for name in _HEAD_NUMBER:
            if isinstance(getattr(self.module, name, None), int):
                setattr(self.module, name, number)
        for name in ("attn_dim", "all_head_size", "split_size"):
            if isinstance(getattr(self.module, name, None), int):
                setattr(self.module, name, number * self.head_dim)
        open_attention_(self.module)
        if not number:
            self._empty_()

    def _empty_(self) -> None:
        """Let an attention without heads add its output bias alone."""
        inside = any(child is self.output for child in self.module.modules())
        path = next((n for n, m in self.module.named_modules() if m is self.output), "")
        returns_tuple = self.family.returns_tuple
        norm = next((n for n, m in self.module.named_modules() if m is self.norm_after), None)

        def forward(
            this: nn.Module, hidden: Tensor | None = None, *args: Any, **kwargs: Any
        ) -> Any:
            x = kwargs.get("hidden_states") if hidden is None else hidden
            assert x is not None
            if inside:
                bias: Any = this.get_submodule(path).bias
                result = torch.zeros_like(x) if bias is None else torch.zeros_like(x) + bias
                if norm is not None:
                    result = this.get_submodule(norm)(x + result)
            else:
                result = x.new_zeros(*x.shape[:-1], 0)
            return (result, None) if returns_tuple else result

        self.module.forward = types.MethodType(forward, self.module)


def _first_number(place: Any, names: tuple[str, ...]) -> int | None:
    """Return the first attribute among these that is a positive whole number."""
    for name in names:
        number = getattr(place, name, None)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    return None


def _cut(module: nn.Module, index: Tensor, dimension: int) -> None:
    """Keep some rows (0) or columns (1) of a linear layer, in place."""
    weight, bias = linear_weight(module), module.bias
    index = index.to(weight.device)
    if bias is not None and dimension == 0:
        bias = bias[index]  # type: ignore[index]
    _set_linear(module, weight.index_select(dimension, index), bias)  # type: ignore[arg-type]


def _set_linear(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a linear layer other weights, of any size, as new parameters."""

    def parameter(old: Any, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.detach().clone().contiguous(), requires_grad=old.requires_grad)

    if isinstance(module, nn.MultiheadAttention):
        module.in_proj_weight = parameter(module.in_proj_weight, weight)
        if module.in_proj_bias is not None and bias is not None:
            module.in_proj_bias = parameter(module.in_proj_bias, bias)
        return
    transposed = type(module).__name__ == "Conv1D"
    module.weight = parameter(module.weight, weight.t() if transposed else weight)
    if module.bias is not None and bias is not None:
        module.bias = parameter(module.bias, bias)
    for name, size in zip(("out_features", "in_features"), weight.shape, strict=True):
        if hasattr(module, name):
            setattr(module, name, size)
    for name, size in zip(("nf", "nx"), weight.shape, strict=True):
        if hasattr(module, name):
            setattr(module, name, size)
