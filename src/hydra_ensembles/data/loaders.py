"""Data: any re-iterable of batches, and ways to make it, map it and pick examples from it.

A list of batches and a `DataLoader` are data. So are the `Batches` that our readers return; their
subsets load only what they hold.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import DataError
from .batches import Batch, batch_length, join, labels_of, take
from .padding import IGNORED, even, padded_one

Data = Iterable[Batch]
Kind = TypeVar("Kind", bound="Batches")


class Batches:
    """Data over indexable examples: `load(indices)` makes a batch, so subsets cost what they hold.

    Args:
        load: makes one batch from a list of example numbers.
        indices: the example numbers, in order.
        batch_size: examples per batch.
        labels: the label of every example that `load` knows (not only of `indices`), if there are
            any.
        info: what goes along (class names, the image transform); read as attributes by name.
    """

    def __init__(
        self,
        load: Callable[[Sequence[int]], Batch],
        indices: Sequence[int],
        *,
        batch_size: int = 32,
        labels: Tensor | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; expected 1 or more.")
        self._load, self._all_labels = load, labels
        self.indices, self.batch_size, self.info = list(indices), batch_size, dict(info or {})

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            yield self.batch(number)

    def batch(self, number: int) -> Batch:
        """Load one batch by its number."""
        start = number * self.batch_size
        return self._load(self.indices[start : start + self.batch_size])

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.__dict__.get("info", {}):
            return self.info[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __repr__(self) -> str:
        return f"Batches({self.count} examples, {len(self)} batches of {self.batch_size})"

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.indices)

    @property
    def labels(self) -> Tensor | None:
        """Labels of the examples, without loading them; None when unknown."""
        return None if self._all_labels is None else self._all_labels[self.indices]

    def mapped(self: Kind, function: Callable[[Batch], Batch]) -> Kind:
        """Return the same examples with a function over every batch."""
        changed, load = copy.copy(self), self._load
        changed._load = lambda rows: function(load(rows))
        return changed

    def subset(self: Kind, rows: Iterable[int], *, batch_size: int | None = None) -> Kind:
        """Return the examples at these positions, in this order."""
        part = copy.copy(self)
        part.indices, part.info = [self.indices[row] for row in rows], dict(self.info)
        part.batch_size = batch_size or self.batch_size
        return part


class Chained:
    """The batches of several data sets, one set after another."""

    def __init__(self, parts: Sequence[Batches]) -> None:
        self.parts = list(parts)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for part in self.parts for batch in part)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def batch(self, number: int) -> Batch:
        """Load one batch by its number."""
        for part in self.parts:
            if number < len(part):
                return part.batch(number)
            number -= len(part)
        raise IndexError(f"There are only {len(self)} batches.")


class Mapped:
    """Data with a function over every batch.

    Args:
        data: Any data.
        start: Makes the function for each pass, so that every pass draws the same numbers.
    """

    def __init__(self, data: Data, start: Callable[[], Callable[[Batch], Batch]]) -> None:
        self.data, self._start = check_reiterable(data), start

    def __iter__(self) -> Iterator[Batch]:
        function = self._start()
        for batch in self.data:
            yield function(batch)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]


class EachBatch:
    """Data with a function over every batch; its other attributes are the data's.

    Args:
        data: Any re-iterable of batches.
        function: Makes a batch of a batch.
    """

    def __init__(self, data: Iterable[Any], function: Callable[[Any], Batch]) -> None:
        self._data, self._function = data, function

    def __iter__(self) -> Iterator[Batch]:
        return map(self._function, self._data)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)


def as_data(source: Any, *, batch_size: int = 32) -> Data:
    """Make data of a dataset, a loader, a list of batches, or of one large batch in memory.

        data = as_data((images, labels), batch_size=64)

    Args:
        source: a `DataLoader` or a list of batches (returned as they are); a map-style dataset
            whose items are tensors, `(input, label)` or mappings; one batch: a tensor, a mapping
            of tensors or a tuple `(inputs, labels)`, which is cut into batches.
        batch_size: examples per batch, where we make the batches.
    """
    if isinstance(source, (Tensor, Mapping, tuple)):
        return Batches(
            lambda rows: take(source, _as_slice(rows)),
            range(batch_length(source)),
            batch_size=batch_size,
            labels=labels_of(source),
        )
    if isinstance(source, (list, Batches, Mapped, torch.utils.data.DataLoader)):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        collate = torch.utils.data.default_collate
        return Batches(
            lambda rows: collate([source[row] for row in rows]),
            range(len(source)),
            batch_size=batch_size,
        )
    return check_reiterable(source)


def check_reiterable(data: Data, *, name: str = "data") -> Data:
    """Return the data if it can be read more than once, else raise; `name` is for the error."""
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"Expected data: a DataLoader, a list of batches or any other re-iterable of batches; "
            f"found {type(data).__name__}. as_data(...) makes data of a dataset."
        )
    if iter(data) is data:
        raise DataError(
            f"The data set {name!r} is a {type(data).__name__} that can be read only once, but "
            "more passes are needed. Pass a DataLoader, or list(...) of it."
        )
    return data


def count(data: Data) -> int:
    """Count the examples of data; reads it once unless its size is known."""
    if isinstance(data, Batches):
        return data.count
    return sum(batch_length(batch) for batch in data)


def indexable(data: Data, *, pad_id: int | None = None) -> Batches:
    """Return data whose examples can be picked one by one; reads other data into memory once.

    Args:
        data: Any data.
        pad_id: The token that pads texts, for texts of different lengths without any padding.
    """
    if isinstance(data, Batches):
        return data
    batches = [batch for batch in check_reiterable(data) if batch_length(batch)]
    if not batches:
        raise DataError("The data is empty: it gave no example.")
    *starts, count = accumulate((batch_length(batch) for batch in batches), initial=0)
    like = padded_one(batches)

    def load(rows: Sequence[int]) -> Batch:
        parts = []
        for index, run in groupby(rows, key=lambda row: bisect_right(starts, row) - 1):
            parts.append(take(batches[index], _as_slice([row - starts[index] for row in run])))
        return join(parts, like=like, pad_id=pad_id)

    labels = [labels_of(batch) for batch in batches]
    known = [label for label in labels if label is not None]
    return Batches(
        load,
        range(count),
        batch_size=max(batch_length(batch) for batch in batches),
        labels=torch.cat(even(known, IGNORED)) if len(known) == len(batches) else None,
    )


def _as_slice(rows: Sequence[int]) -> Sequence[int] | slice:
    """Return a slice for consecutive rows: a view instead of a copy."""
    if rows and all(after == before + 1 for before, after in pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return rows
