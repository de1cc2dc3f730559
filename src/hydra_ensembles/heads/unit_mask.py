"""Which heads and which neurons of its MLPs a model keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._records import read_record, to_record
from .._tensors import write_tensors
from ..errors import MaskError
from ..hosts import HostModel, host_model
from .head_mask import HeadMask, Keep, check_fits, keep_counts
from .head_tables import Rows
from .mask_table import MaskTable


class NeuronMask(MaskTable):
    """Which neurons each layer keeps; an empty row keeps all of them."""

    _units: ClassVar[str] = "neurons"


class UnitMask:
    """Which heads and which neurons of its MLPs a model keeps.

    A `HeadMask` is accepted wherever a `UnitMask` is: it keeps all neurons.

    Args:
        heads: A `HeadMask`, or rows of 0/1 by layer; True = kept.
        neurons: Rows of 0/1 by layer. An empty row keeps all neurons of its layer, whatever their
            number; by default all rows are empty.

    Example:
        >>> mask = UnitMask(heads=[[1, 0], [1, 1]], neurons=[[1, 0, 0, 1], []])
        >>> print(mask)
        UnitMask: 3 of 4 heads, 2 of 4 neurons kept
          0  heads 1/2  neurons 2/4
          1  heads 2/2  all neurons
    """

    def __init__(self, heads: HeadMask | Rows, neurons: NeuronMask | Rows | None = None) -> None:
        self.heads = HeadMask(heads)  # type: ignore[arg-type]
        rows = [[] for _ in self.heads] if neurons is None else neurons
        self.neurons = NeuronMask(rows)  # type: ignore[arg-type]
        if len(self.heads) != len(self.neurons):
            raise MaskError(
                f"A UnitMask with heads of {len(self.heads)} layers has neurons of "
                f"{len(self.neurons)}: give one row of each per layer, an empty one to keep all."
            )

    @classmethod
    def of(cls, mask: UnitMask | HeadMask) -> UnitMask:
        """Return a mask as a `UnitMask`; a `HeadMask` keeps all neurons."""
        return mask if isinstance(mask, UnitMask) else cls(mask)

    @classmethod
    def full(cls, model: Any) -> UnitMask:
        """Keep every head and neuron of a model; rows of neurons that must stay are empty."""
        host = host_model(model)
        neurons = [torch.ones(n, dtype=torch.bool) for n in host.neuron_counts]
        return cls(HeadMask.full(host), neurons)

    @classmethod
    def random(cls, model: Any, *, keep: Keep = 0.5, seed: int = 0) -> UnitMask:
        """Keep a share of the heads and of the neurons of each layer at random, seeded."""
        host = host_model(model)
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for count in host.neuron_counts:
            number = keep_counts(keep, [count])[0] if count else 0
            row = torch.zeros(count, dtype=torch.bool)
            row[torch.randperm(count, generator=generator)[:number]] = True
            rows.append(row)
        return cls(HeadMask.random(host, keep=keep, seed=seed), rows)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def total_kept(self) -> int:
        """Total number of kept heads and neurons."""
        return self.heads.total_kept + self.neurons.total_kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitMask):
            return NotImplemented
        return self.heads == other.heads and self.neurons == other.neurons

    def __hash__(self) -> int:
        return hash((self.heads, self.neurons))

    # --- operations on sets -----------------------------------------------------------------------

    def _combine(self, other: UnitMask | HeadMask, op: Callable[[Any, Any], Any]) -> UnitMask:
        if not isinstance(other, (UnitMask, HeadMask)):
            return NotImplemented
        other = UnitMask.of(other)
        ours, theirs = _evened(self.neurons, other.neurons), _evened(other.neurons, self.neurons)
        return UnitMask(op(self.heads, other.heads), op(ours, theirs))

    def __and__(self, other: UnitMask | HeadMask) -> UnitMask:
        return self._combine(other, lambda a, b: a & b)

    def __or__(self, other: UnitMask | HeadMask) -> UnitMask:
        return self._combine(other, lambda a, b: a | b)

    def __xor__(self, other: UnitMask | HeadMask) -> UnitMask:
        return self._combine(other, lambda a, b: a ^ b)

    def __sub__(self, other: UnitMask | HeadMask) -> UnitMask:
        return self._combine(other, lambda a, b: a - b)

    def __rsub__(self, other: HeadMask) -> UnitMask:
        return self._combine(other, lambda a, b: b - a)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> UnitMask:
        return UnitMask(~self.heads, ~self.neurons)

    def __le__(self, other: UnitMask | HeadMask) -> bool:
        """Return whether every unit kept here is kept in `other` too."""
        return (self - other).total_kept == 0

    # --- printing and files -----------------------------------------------------------------------

    def _title(self) -> str:
        counts = (
            f"{t.total_kept} of {sum(t.shape)} {t._units}" for t in (self.heads, self.neurons)
        )
        return f"UnitMask: {', '.join(counts)} kept"

    def __str__(self) -> str:
        lines, digits = [self._title()], len(str(len(self) - 1))
        for layer, (heads, neurons) in enumerate(zip(self.heads, self.neurons, strict=True)):
            said = f"neurons {int(neurons.sum())}/{len(neurons)}" if len(neurons) else "all neurons"
            lines.append(f"  {layer:>{digits}}  heads {int(heads.sum())}/{len(heads)}  {said}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def tolist(self) -> dict[str, list[list[int]]]:
        """Return nested Python lists of 0 and 1, by the arguments of `UnitMask`."""
        return {**self.heads._payload(), **self.neurons._payload()}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the mask as JSON text; write it to `path` (beside, then renamed) when given."""
        return to_record("UnitMask", self.tolist(), path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> UnitMask:
        """Read a mask from JSON text or from a file's path."""
        payload = read_record("UnitMask", source, error=MaskError)
        if not {"heads", "neurons"} <= payload.keys():
            raise MaskError(
                "This JSON of a UnitMask lacks 'heads' or 'neurons'. It must come from "
                "UnitMask.to_json()."
            )
        return cls(payload["heads"], payload["neurons"])

    def to_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write the mask's rows to a file, as `heads.0`, `neurons.0` and so on."""
        tables = (self.heads, self.neurons)
        rows = {f"{t._units}.{i}": row for t in tables for i, row in enumerate(t)}
        write_tensors(Path(path), rows)

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> UnitMask:
        """Read a mask that `to_safetensors` wrote."""
        from safetensors.torch import load_file

        rows = load_file(path)
        try:
            heads, neurons = (
                [rows[f"{units}.{layer}"] for layer in range(len(rows) // 2)]
                for units in ("heads", "neurons")
            )
        except KeyError as error:
            raise MaskError(
                f"{path} has no {error}: expected a file written by UnitMask.to_safetensors()."
            ) from None
        return cls(heads, neurons)


def _evened(mask: NeuronMask, other: NeuronMask) -> NeuronMask:
    """Give rows that keep all neurons their number, where another mask has it."""
    pairs = zip(mask, other, strict=True)
    return NeuronMask([row if len(row) else torch.ones_like(like) for row, like in pairs])


def check_units_fit(mask: UnitMask, host: HostModel) -> None:
    """Raise a `MaskError` when a mask was not made for this model."""
    check_fits(mask.heads, host)
    for layer, (found, there) in enumerate(zip(mask.neurons.shape, host.mlps, strict=True)):
        if found and isinstance(there, str):
            raise MaskError(
                f"UnitMask has {found} neurons in layer {layer}, but those of {host.name} stay: "
                f"{there}. Give an empty row; UnitMask.full(model) has one."
            )
        if found and not isinstance(there, str) and found != there.neurons:
            raise MaskError(
                f"UnitMask has {found} neurons in layer {layer} but {host.name} has "
                f"{there.neurons}. Start from UnitMask.full(model), or check that the mask was "
                "made for this model."
            )


def gates_of(table: MaskTable) -> list[Tensor | None]:
    """Return the gates of a mask: None for layers that keep everything."""
    return [None if bool(row.all()) else row for row in table]
