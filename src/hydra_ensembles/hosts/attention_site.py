"""One attention layer of a host model: its projections seen head by head, and their removal."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .attention import Grid, find_table
from .families import Family, first
from .head_weights import HeadWeights, linear_bias, linear_weight, parameter_like, set_linear_
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


class AttentionSite:
    """Where one attention layer's heads are.

    Attributes:
        module: The module whose forward does the attention.
        output: The output projection, at whose input a head is gated.
        head_dim, num_heads, kv_heads, scale, causal: Its geometry.
        softcap: Soft bound of its scores, or None.
        table: Its relative position table, or None.
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
        self.counts_itself = True  # whether the attention module knows its number of heads
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
            f"Layer {self.layer}: {type(self.module).__name__} has neither a head width "
            f"({', '.join(_HEAD_WIDTH)}) nor a number of heads ({', '.join(_HEAD_NUMBER)}). "
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
        if self.packed is None:
            return self.num_heads
        return (linear_weight(self.packed).shape[0] // self.head_dim - self.num_heads) // 2

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
        """The image size that its relative position table is made for, if it has one."""
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
        """Return the names of parameters that are not projections and cannot be cut by heads."""
        known = {id(p) for part in self._parts() for p in part.parameters()}
        known |= {id(p) for norm in self.head_norms if norm is not None for p in norm.parameters()}
        if self.norm_after is not None:
            known |= {id(p) for p in self.norm_after.parameters()}
        known |= {id(bias) for bias in self._bare_biases}
        known |= {id(self.table.weight)} if self.table is not None else set()
        return [name for name, p in self.module.named_parameters() if id(p) not in known]

    def _parts(self) -> list[nn.Module]:
        parts = (self.query, self.key, self.value, self.packed, self.output)
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
        (q, bq), (k, bk), (v, bv) = self._projections()
        group = self.num_heads // self.kv_heads if self.kv_heads else 1

        def by_head(rows: Tensor | None, repeats: int) -> Any:
            rows = None if rows is None else rows.unflatten(0, (-1, self.head_dim))
            return rows if rows is None or repeats == 1 else rows.repeat_interleave(repeats, 0)

        return HeadWeights(
            *(by_head(q, 1), by_head(k, group), by_head(v, group)),
            *(by_head(bq, 1), by_head(bk, group), by_head(bv, group)),
            output=linear_weight(self.output).unflatten(1, (-1, self.head_dim)).transpose(0, 1),
            positions=None if self.table is None else self.table.weight.t()[: self.num_heads],
        )

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of queries, keys and values: views of one linear, or of three."""
        if self.packed is None:
            return [(linear_weight(part), linear_bias(part)) for part in self._parts()[:3]]
        sizes = [n * self.head_dim for n in (self.num_heads, self.kv_heads, self.kv_heads)]
        bias = linear_bias(self.packed)
        biases = [None] * 3 if bias is None else list(bias.split(sizes))
        if self._bare_biases:
            biases[0], biases[2] = self._bare_biases
        return list(zip(linear_weight(self.packed).split(sizes), biases, strict=True))

    def _put_projections_(self, projections: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Replace weight and bias of queries, keys and values, of any number of heads, in place."""
        if self.packed is None:
            for part, (weight, bias) in zip(self._parts()[:3], projections, strict=True):
                set_linear_(part, weight, bias)
            return
        biases = [bias for _, bias in projections]
        bare = self._bare_biases
        whole = None if bare or biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        set_linear_(self.packed, torch.cat([weight for weight, _ in projections]), whole)
        for name, old, bias in zip(("q_bias", "v_bias"), bare, biases[::2], strict=False):
            assert bias is not None
            setattr(self.module, name, parameter_like(old, bias))
            if name == "v_bias" and isinstance(getattr(self.module, "k_bias", None), Tensor):
                self.module.k_bias = torch.zeros_like(bias)  # keys have none, kept as zeros

    @property
    def _bare_biases(self) -> tuple[nn.Parameter, ...]:
        """The biases of queries and values that timm keeps beside one linear for all three."""
        if self.packed is None or isinstance(self.packed, nn.MultiheadAttention):
            return ()
        biases = [getattr(self.module, name, None) for name in ("q_bias", "v_bias")]
        found = tuple(bias for bias in biases if isinstance(bias, nn.Parameter))
        return found if len(found) == 2 else ()

    def why_no_weights(self) -> str | None:
        """Say why the weights cannot be seen head by head, or None."""
        heads, groups = self.num_heads, self.kv_heads
        if self.packed is not None:
            linears, sizes = [self.packed], [heads + 2 * groups]
        else:
            linears, sizes = self._parts()[:-1], [heads, groups, groups]
        if len(linears) != len(sizes):
            return "its queries, keys or values are not made by one linear of their own"
        rows = [len(linear_weight(linear)) for linear in linears]
        grouped = groups > 0 and heads % groups == 0
        fits = rows == [size * self.head_dim for size in sizes]
        if not fits or not (grouped or heads == groups == 0):  # an emptied layer has none
            return (
                f"its query, key and value projections have {rows} rows, not a multiple of the "
                f"head width {self.head_dim}"
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
            return "its relative position table does not have one column per head"
        unknown = self.unknown_parameters()
        if unknown:
            words = describe_parameters(unknown, of_attention=True)
            return f"its attention also has {words}, which cannot be cut by heads"
        return None

    def cut_(self, heads: list[int]) -> None:
        """Remove every head but these, in place, whether or not the attention's code allows it."""
        rows, kv_rows = self._rows(heads), self._rows(self.kept_groups(heads))
        kept = [
            (weight[index], None if bias is None else bias[index])
            for (weight, bias), index in zip(
                self._projections(), (rows, kv_rows, kv_rows), strict=True
            )
        ]
        self._put_projections_(kept)
        set_linear_(self.output, linear_weight(self.output)[:, rows], self.output_bias)
        if self.table is not None:
            self.table.cut_(heads)
        self._note_heads(len(heads))

    def kept_groups(self, heads: list[int]) -> list[int]:
        """Return the key heads of these heads; grouped queries are kept or removed together."""
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
        device = linear_weight(self.output).device
        index = torch.tensor(heads, dtype=torch.long, device=device)[:, None] * self.head_dim
        return (index + torch.arange(self.head_dim, device=device)).flatten()

    def replace_(self, weights: HeadWeights, output_bias: Tensor | None) -> None:
        """Replace all heads by other heads, any number of them, in place."""
        self.module.__dict__.pop("forward", None)  # a layer that was empty attends again
        rows = (weights.query, weights.key, weights.value)
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        self._put_projections_(
            [
                (weight.flatten(0, 1), None if bias is None else bias.flatten())
                for weight, bias in zip(rows, biases, strict=True)
            ]
        )
        if self.table is not None and weights.positions is not None:
            self.table.put_(weights.positions.t())
        set_linear_(self.output, weights.output.transpose(0, 1).flatten(1), output_bias)
        self._note_heads(len(weights.query), kv_heads=len(weights.key))

    def grow_(self, number: int) -> None:
        """Make room for a number of heads, without storage (for counting), in place."""
        self.module.__dict__.pop("forward", None)  # a layer that was empty attends again
        group = self.num_heads // self.kv_heads if self.kv_heads else 1

        def room(like: Tensor, heads: int) -> Tensor:
            return like.new_empty(heads * self.head_dim, *like.shape[1:], device="meta")

        self._put_projections_(
            [
                (room(weight, heads), None if bias is None else room(bias, heads))
                for (weight, bias), heads in zip(
                    self._projections(), (number, number // group, number // group), strict=True
                )
            ]
        )
        if self.table is not None:
            entries = self.table.weight.shape[0]
            self.table.put_(self.table.weight.new_empty(entries, number, device="meta"))
        output = room(linear_weight(self.output).t(), number).t()
        set_linear_(self.output, output, self.output_bias)
        self._note_heads(number, kv_heads=number if group == 1 else None)

    def _note_heads(self, number: int, *, kv_heads: int | None = None) -> None:
        """Tell the attention module how many heads it has now, and how many key heads, if given."""
        numbers = dict.fromkeys(_HEAD_NUMBER, number)
        numbers |= dict.fromkeys(
            ("attn_dim", "all_head_size", "split_size"), number * self.head_dim
        )
        if kv_heads is not None:  # every query has its own key
            numbers |= {"num_key_value_groups": 1, "num_key_value_heads": kv_heads}
        for name, value in numbers.items():
            if isinstance(getattr(self.module, name, None), int):
                setattr(self.module, name, value)
        open_attention_(self.module)
        if not number:
            self._empty_()

    def _empty_(self) -> None:
        """Let an attention without heads add only its output bias."""
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
