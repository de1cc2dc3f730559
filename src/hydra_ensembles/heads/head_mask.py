"""Head masks and head scores: plain tables `[layers][heads]` that print, save and can be edited.

A mask is True where the head is **kept**. A score is higher where the head matters **more**.
Layers may have different numbers of heads. Ties are broken by the lower index, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._tables import squares
from ..errors import MaskError
from ..registry import check_name
from .head_tables import HeadTable, Rows
from .head_tables import check_fits as check_fits
from .head_tables import describe_shape as describe_shape
from .head_tables import head_counts as head_counts

Keep = float | int | Sequence[int]


class HeadMask(HeadTable):
    """Which heads a model keeps.

    Args:
        rows: Nested lists or a tensor `[layers, heads]` of 0/1 or booleans; True = kept.

    Example:
        >>> mask = HeadMask([[1, 0, 1], [0, 1]])
        >>> mask.kept
        (2, 1)
        >>> print(mask)
        HeadMask: 3 of 5 heads kept
          0  ■ · ■  2/3
          1  · ■    1/2
    """

    _dtype = torch.bool

    def _checked(self, layer: int, values: Tensor) -> Tensor:
        if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
            raise MaskError(
                f"Layer {layer} of a HeadMask holds {values.tolist()}: expected 0/1 or True/False. "
                "For soft gates pass a list of tensors to gate()."
            )
        return values.to(torch.bool)

    @classmethod
    def full(cls, like: Any) -> HeadMask:
        """Keep every head of a model, a HostModel, another table or a list of head counts."""
        return cls([torch.ones(n, dtype=torch.bool) for n in head_counts(like)])

    @classmethod
    def random(
        cls, like: Any, *, keep: Keep = 0.5, scope: str = "layer", seed: int = 0
    ) -> HeadMask:
        """Keep heads at random, seeded."""
        generator = torch.Generator().manual_seed(seed)
        scores = HeadScores([torch.rand(n, generator=generator) for n in head_counts(like)])
        return scores.top_k(keep, scope=scope)

    @property
    def kept(self) -> tuple[int, ...]:
        """Number of heads kept in each layer."""
        return tuple(int(row.sum()) for row in self.rows)

    @property
    def total_kept(self) -> int:
        """Total number of kept heads."""
        return sum(self.kept)

    def indices(self, layer: int) -> list[int]:
        """Return the kept heads of a layer, in order."""
        return self.rows[layer].nonzero().flatten().tolist()

    def pairs(self) -> list[tuple[int, int]]:
        """Return the kept heads as `(layer, head)` pairs."""
        return [(layer, head) for layer in range(len(self)) for head in self.indices(layer)]

    def with_layer(self, layer: int, row: Any) -> HeadMask:
        """Return a copy in which one layer's row is replaced."""
        rows = list(self.rows)
        rows[layer] = torch.as_tensor(row)
        result = HeadMask(rows)
        self._same_shape(result)
        return result

    def _same_shape(self, other: HeadMask) -> None:
        if self.shape != other.shape:
            raise MaskError(
                f"Two masks of different shapes: {describe_shape(self.shape)} and "
                f"{describe_shape(other.shape)}. Both must be made for the same model."
            )

    def _combine(self, other: HeadMask, op: Callable[[Tensor, Tensor], Tensor]) -> HeadMask:
        if not isinstance(other, HeadMask):
            return NotImplemented
        self._same_shape(other)
        return HeadMask([op(a, b) for a, b in zip(self.rows, other.rows, strict=True)])

    def __and__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, torch.logical_and)

    def __or__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, torch.logical_or)

    def __xor__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, torch.logical_xor)

    def __sub__(self, other: HeadMask) -> HeadMask:
        return self._combine(other, lambda a, b: a & ~b)

    def __invert__(self) -> HeadMask:
        return HeadMask([~row for row in self.rows])

    def __le__(self, other: HeadMask) -> bool:
        """Return whether every head kept here is kept in `other` too."""
        return (self - other).total_kept == 0

    def overlap(self, other: HeadMask) -> float:
        """Return the Jaccard index of the kept heads (1 when both are empty)."""
        union = (self | other).total_kept
        return (self & other).total_kept / union if union else 1.0

    def __str__(self) -> str:
        width = max(self.shape)
        lines = [f"HeadMask: {self.total_kept} of {sum(self.shape)} heads kept"]
        digits = len(str(len(self) - 1))
        for layer, row in enumerate(self.rows):
            grid = " ".join("■" if kept else "·" for kept in row.tolist())
            pad = " " * (2 * (width - len(row)))
            lines.append(f"  {layer:>{digits}}  {grid}{pad}  {int(row.sum())}/{len(row)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"HeadMask: {self.total_kept} of {sum(self.shape)} heads kept"
        notes = [f"{int(row.sum())}/{len(row)}" for row in self.rows]
        return squares(title, [[float(kept) for kept in row.tolist()] for row in self.rows], notes)

    def __repr__(self) -> str:
        return f"HeadMask({[[int(v) for v in row] for row in self.tolist()]})"

    def _payload(self) -> dict[str, Any]:
        return {"heads": [[int(v) for v in row] for row in self.tolist()]}


class HeadScores(HeadTable):
    """How much each head matters (higher = keep).

    Args:
        rows: Nested lists or a tensor `[layers, heads]` of numbers.
        name: What the numbers are, for printing.
        standard_error: A table of the same shape with each score's standard error, if known.
    """

    _dtype = torch.float64

    def __init__(self, rows: Rows, *, name: str = "", standard_error: Rows | None = None) -> None:
        super().__init__(rows)
        self.name: str = name or (rows.name if isinstance(rows, HeadScores) else "")
        self.standard_error = None if standard_error is None else HeadScores(standard_error)
        if self.standard_error is not None and self.standard_error.shape != self.shape:
            raise MaskError(
                f"Standard errors of shape {describe_shape(self.standard_error.shape)} do not fit "
                f"scores of shape {describe_shape(self.shape)}."
            )

    def _checked(self, layer: int, values: Tensor) -> Tensor:
        values = values.to(torch.float64)
        if not bool(torch.isfinite(values).all()):
            raise MaskError(
                f"Layer {layer} of HeadScores holds a value that is not finite: {values.tolist()}. "
                "Check the calibration data and the loss for NaN or infinity."
            )
        return values

    def flat(self) -> Tensor:
        """Return all scores in one vector, layer by layer."""
        return torch.cat(self.rows)

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadScores:
        """Apply a function to every layer's row."""
        return HeadScores([function(row) for row in self.rows], name=self.name)

    def minmax(self) -> HeadScores:
        """Scale to [0, 1] over all heads; constant scores give 0."""
        low, high = self.flat().min(), self.flat().max()
        span = high - low
        return self.map(lambda row: (row - low) / span if span > 0 else torch.zeros_like(row))

    def normalized(self) -> HeadScores:
        """Divide every layer by its L2 norm (a layer of zeros stays)."""

        def divide(row: Tensor) -> Tensor:
            norm = row.norm()
            return row / norm if norm > 0 else row

        return self.map(divide)

    def top_k(self, keep: Keep, *, scope: str = "layer") -> HeadMask:
        """Keep the highest scores.

        Args:
            keep: A fraction of the heads (a float in [0, 1]), a number of heads (an int), or a
                list with one such value per layer. A fraction is rounded, at least one head.
            scope: `"layer"` ranks within each layer; `"model"` ranks all layers together (then a
                layer may lose all its heads).
        """
        check_name("scope", scope, ("layer", "model"))

        def highest(values: Tensor, count: int) -> Tensor:
            kept = torch.zeros(len(values), dtype=torch.bool)
            kept[_highest(values, count)] = True
            return kept

        if scope == "layer":
            counts = keep_counts(keep, self.shape)
            return HeadMask([highest(*row) for row in zip(self.rows, counts, strict=True)])
        if not isinstance(keep, (int, float)):
            raise MaskError('keep must be one number with scope="model", not a list by layer.')
        flat = self.flat()
        return HeadMask(highest(flat, keep_count(keep, len(flat))).split(list(self.shape)))

    def ranking(self) -> list[tuple[int, int]]:
        """Return `(layer, head)` pairs from the most to the least important."""
        pairs = [(layer, head) for layer, n in enumerate(self.shape) for head in range(n)]
        return [pairs[i] for i in _highest(self.flat(), sum(self.shape)).tolist()]

    def _combine(self, other: Any, op: Callable[[Any, Any], Tensor]) -> HeadScores:
        if isinstance(other, (int, float)):
            return self.map(lambda row: op(row, other))
        if not isinstance(other, HeadScores):
            return NotImplemented  # type: ignore[no-any-return]
        if self.shape != other.shape:
            raise MaskError(
                f"Scores of different shapes: {describe_shape(self.shape)} and "
                f"{describe_shape(other.shape)}."
            )
        return HeadScores([op(a, b) for a, b in zip(self.rows, other.rows, strict=True)])

    def __add__(self, other: Any) -> HeadScores:
        return self._combine(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> HeadScores:
        return self._combine(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> HeadScores:
        return self._combine(other, lambda a, b: a * b)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> HeadScores:
        return self._combine(other, lambda a, b: b - a)

    def __neg__(self) -> HeadScores:
        return self.map(torch.neg)

    def __str__(self) -> str:
        digits = len(str(len(self) - 1))
        title = f"HeadScores ({self.name})" if self.name else "HeadScores"
        lines = [f"{title}: {len(self)} layers, {sum(self.shape)} heads, higher = keep"]
        for layer, row in enumerate(self.rows):
            lines.append(
                f"  {layer:>{digits}}  " + " ".join(f"{value:9.3g}" for value in row.tolist())
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"HeadScores ({self.name})" if self.name else "HeadScores"
        lowest, highest = (f"{float(v):.3g}" for v in (self.flat().min(), self.flat().max()))
        title += f": {len(self)} layers, {sum(self.shape)} heads, darker = keep"
        notes = [f"{float(row.min()):.3g} to {float(row.max()):.3g}" for row in self.rows]
        rows = [row.tolist() for row in self.minmax().rows]
        return squares(f"{title} ({lowest} to {highest})", rows, notes)

    def __repr__(self) -> str:
        return f"HeadScores({self.tolist()}, name={self.name!r})"

    def _payload(self) -> dict[str, Any]:
        errors = None if self.standard_error is None else self.standard_error.tolist()
        return {"heads": self.tolist(), "name": self.name, "standard_error": errors}

    @classmethod
    def _from_payload(cls, payload: dict[str, Any]) -> HeadScores:
        return cls(
            payload["heads"],
            name=payload.get("name", ""),
            standard_error=payload.get("standard_error"),
        )


def _highest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest values, ties by the lower index."""
    return torch.sort(values, descending=True, stable=True).indices[:count]


def keep_count(keep: float | int, heads: int) -> int:
    """Turn a fraction (rounded, at least one) or a number into a number of heads."""
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise MaskError(f"keep must be a fraction or a number of heads, not {keep!r}.")
    if isinstance(keep, float):
        if not 0.0 <= keep <= 1.0:
            raise MaskError(f"keep={keep} is not a fraction between 0 and 1.")
        return min(heads, max(1, int(keep * heads + 0.5)))
    if not 0 <= keep <= heads:
        raise MaskError(f"keep={keep} heads of {heads}: expected a number from 0 to {heads}.")
    return keep


def keep_counts(keep: Keep, heads: Sequence[int]) -> tuple[int, ...]:
    """Turn `keep` (one value, or a list by layer) into the number of heads per layer."""
    if isinstance(keep, (int, float)):
        return tuple(keep_count(keep, n) for n in heads)
    if len(keep) != len(heads):
        raise MaskError(
            f"keep lists {len(keep)} layers but the model has {len(heads)}: give one value per "
            "layer."
        )
    return tuple(keep_count(k, n) for k, n in zip(keep, heads, strict=True))
