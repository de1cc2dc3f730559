"""What masks of heads and of neurons share: the units that each layer keeps, as sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .._tables import squares
from ..errors import MaskError
from .head_tables import HeadTable, describe_shape

if TYPE_CHECKING:
    from typing_extensions import Self


class MaskTable(HeadTable):
    """Which units of one kind each layer keeps: True = kept."""

    _dtype = torch.bool
    _units: ClassVar[str] = "heads"

    def _checked(self, layer: int, values: Tensor) -> Tensor:
        if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
            raise MaskError(
                f"Layer {layer} of a {type(self).__name__} holds {values.tolist()}: expected 0/1 "
                "or True/False. For soft gates pass a list of tensors to gate()."
            )
        return values.to(torch.bool)

    @property
    def kept(self) -> tuple[int, ...]:
        """Number of units kept in each layer."""
        return tuple(int(row.sum()) for row in self.rows)

    @property
    def total_kept(self) -> int:
        """Total number of kept units."""
        return sum(self.kept)

    def indices(self, layer: int) -> list[int]:
        """Return the kept units of a layer, in order."""
        return self.rows[layer].nonzero().flatten().tolist()

    def pairs(self) -> list[tuple[int, int]]:
        """Return the kept units as `(layer, unit)` pairs."""
        return [(layer, unit) for layer in range(len(self)) for unit in self.indices(layer)]

    def with_layer(self, layer: int, row: Any) -> Self:
        """Return a copy in which one layer's row is replaced."""
        rows = list(self.rows)
        rows[layer] = torch.as_tensor(row)
        result = type(self)(rows)
        self._same_shape(result)
        return result

    def _same_shape(self, other: Self) -> None:
        if self.shape != other.shape:
            raise MaskError(
                f"Two masks of different shapes: {describe_shape(self.shape)} and "
                f"{describe_shape(other.shape)}. Both must be made for the same model."
            )

    def _combine(self, other: Self, op: Callable[[Tensor, Tensor], Tensor]) -> Self:
        if type(other) is not type(self):
            return NotImplemented  # type: ignore[no-any-return]
        self._same_shape(other)
        return type(self)([op(a, b) for a, b in zip(self.rows, other.rows, strict=True)])

    def __and__(self, other: Self) -> Self:
        return self._combine(other, torch.logical_and)

    def __or__(self, other: Self) -> Self:
        return self._combine(other, torch.logical_or)

    def __xor__(self, other: Self) -> Self:
        return self._combine(other, torch.logical_xor)

    def __sub__(self, other: Self) -> Self:
        return self._combine(other, lambda a, b: a & ~b)

    def __invert__(self) -> Self:
        return type(self)([~row for row in self.rows])

    def __le__(self, other: Self) -> bool:
        """Return whether every unit kept here is kept in `other` too."""
        return bool((self - other).total_kept == 0)

    def overlap(self, other: Self) -> float:
        """Return the Jaccard index of the kept units (1 when both are empty)."""
        union = (self | other).total_kept
        return (self & other).total_kept / union if union else 1.0

    def __str__(self) -> str:
        width = max(self.shape)
        lines = [self._title()]
        digits = len(str(len(self) - 1))
        for layer, row in enumerate(self.rows):
            grid = " ".join("■" if kept else "·" for kept in row.tolist())
            pad = " " * (2 * (width - len(row)))
            lines.append(f"  {layer:>{digits}}  {grid}{pad}  {int(row.sum())}/{len(row)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        notes = [f"{int(row.sum())}/{len(row)}" for row in self.rows]
        return squares(
            self._title(), [[float(kept) for kept in row.tolist()] for row in self.rows], notes
        )

    def _title(self) -> str:
        return f"{type(self).__name__}: {self.total_kept} of {sum(self.shape)} {self._units} kept"

    def _payload(self) -> dict[str, Any]:
        return {self._units: [[int(v) for v in row] for row in self.tolist()]}
