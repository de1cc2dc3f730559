"""Tables `[layers][heads]` of any row lengths: what masks and scores have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._records import read_json, read_record, to_record
from ..errors import MaskError
from ..hosts.host import describe_shape as describe_shape
from ..hosts.host import host_model

Rows = Sequence[Any] | Tensor


class HeadTable:
    """Values per head: one row per layer, rows of any length."""

    _dtype: torch.dtype

    def __init__(self, rows: Rows) -> None:
        if isinstance(rows, HeadTable):
            rows = rows.rows
        if isinstance(rows, Tensor) and rows.dim() != 2:
            raise MaskError(
                f"{type(self).__name__} needs a [layers, heads] table but got a tensor of shape "
                f"{tuple(rows.shape)}. Pass nested lists for layers of different sizes."
            )
        self.rows: tuple[Tensor, ...] = tuple(
            self._row(layer, row) for layer, row in enumerate(rows)
        )
        if not self.rows:
            raise MaskError(f"{type(self).__name__} needs at least one layer but got none.")

    def _row(self, layer: int, row: Any) -> Tensor:
        # a plain list would be read in float32, and loaded scores would not equal the saved ones
        listed = not isinstance(row, Tensor) and self._dtype.is_floating_point
        try:
            values = torch.as_tensor(row, dtype=self._dtype if listed else None).detach().to("cpu")
        except (TypeError, ValueError, RuntimeError):
            raise MaskError(
                f"Layer {layer} of a {type(self).__name__} must be a list of numbers, one per "
                f"head; found {row!r:.60}."
            ) from None
        if values.dim() != 1:
            raise MaskError(
                f"Layer {layer} of a {type(self).__name__} must be a list of heads but has shape "
                f"{tuple(values.shape)}."
            )
        return self._checked(layer, values).clone()

    def _checked(self, layer: int, values: Tensor) -> Tensor:
        return values.to(self._dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of heads in each layer."""
        return tuple(len(row) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, layer: int) -> Tensor:
        return self.rows[layer]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, HeadTable)
        return self.shape == other.shape and all(
            torch.equal(a, b) for a, b in zip(self.rows, other.rows, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(tuple(row.tolist()) for row in self.rows))

    def tolist(self) -> list[list[Any]]:
        """Return nested Python lists."""
        return [row.tolist() for row in self.rows]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as JSON text; write it to `path` (beside, then renamed) when given."""
        return to_record(type(self).__name__, self._payload(), path)

    def _payload(self) -> dict[str, Any]:
        return {"heads": self.tolist()}

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Any:
        """Read a table from JSON text or from a file's path."""
        what, advice = f"the JSON of a {cls.__name__}", f"Write it with {cls.__name__}.to_json()."
        rows = read_json(source, what, advice, error=MaskError)
        if isinstance(rows, list):  # bare rows, written by hand
            return cls(rows)
        payload = read_record(cls.__name__, source, error=MaskError)
        if "heads" not in payload:
            raise MaskError(
                f"This JSON of a {cls.__name__} has no 'heads'. "
                f"It must come from {cls.__name__}.to_json()."
            )
        return cls._from_payload(payload)

    @classmethod
    def _from_payload(cls, payload: dict[str, Any]) -> Any:
        return cls(payload["heads"])


def head_counts(like: Any) -> tuple[int, ...]:
    """Return the number of heads of each layer of a model, a HostModel, a table or a list."""
    if isinstance(like, HeadTable):
        return like.shape
    if isinstance(like, torch.nn.Module):
        return host_model(like).head_counts
    if hasattr(like, "head_counts"):
        return tuple(like.head_counts)
    if not isinstance(like, Sequence) or isinstance(like, str):
        raise MaskError(
            f"Expected a model, a mask or the number of heads by layer; found {like!r:.60}."
        )
    return tuple(int(n) for n in like)


def check_fits(table: HeadTable, model: Any, name: str | None = None) -> None:
    """Raise a `MaskError` when a table was not made for this model."""
    counts = head_counts(model)
    name = name or getattr(model, "name", type(model).__name__)
    kind = type(table).__name__
    if len(table) != len(counts):
        raise MaskError(
            f"{kind} has {len(table)} layers but {name} has {len(counts)}. Start from "
            "HeadMask.full(model), or check that the mask was made for this model."
        )
    for layer, (found, expected) in enumerate(zip(table.shape, counts, strict=True)):
        if found != expected:
            raise MaskError(
                f"{kind} has {found} heads in layer {layer} but {name} has {expected}. Start from "
                "HeadMask.full(model), or check that the mask was made for this model."
            )
