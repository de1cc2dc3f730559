"""Batches and data: what every other room iterates over, and the one toolkit for them.

A *batch* is what the host takes: a mapping with an optional `labels`, `(inputs, labels)`, or the
inputs only. *Data* is any re-iterable of batches: a list, a `DataLoader`, or the `Batches` that
our loaders give, which can also be subset without reading what is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import DataError
from .padding import IGNORED, even, even_columns, padded_one

Batch = Any
Data = Iterable[Batch]
LABEL_KEYS = ("labels", "label")
IMAGE_KEYS = ("pixel_values", "image", "images", "inputs", "x")


def map_columns(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Apply a function to every column of a batch; mappings become dicts.

    A batch is a tree (torch's pytree) of mappings, tuples and lists whose leaves are columns:
    tensors, lists of strings, or single values that go along.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # a tokenizer's BatchEncoding is no dict
            return {key: map_columns(function, value) for key, value in leaf.items()}
        return function(leaf)

    return pytree.tree_map(apply, batch, is_leaf=_is_column)


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of a batch; leave the rest alone."""
    return map_columns(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def move(batch: Batch, device: torch.device | str | None) -> Batch:
    """Move the tensors of a batch to a device; None leaves them where they are."""
    return batch if device is None else map_tensors(lambda tensor: tensor.to(device), batch)


def columns(batch: Batch) -> list[tuple[str, Any]]:
    """Return every column of a batch with its path, such as `.input_ids` or `[0].pixel_values`."""
    plain = map_columns(lambda leaf: leaf, batch)
    leaves, _ = pytree.tree_flatten_with_path(plain, is_leaf=_is_column)
    return [("".join(map(_step, path)), leaf) for path, leaf in leaves]


def _step(key: Any) -> str:
    return f"[{key.idx}]" if isinstance(key, pytree.SequenceKey) else f".{key.key}"


def _is_column(value: Any) -> bool:
    # a DataLoader's default collate gives [inputs, labels] as a list; a list of strings is one
    # column
    if isinstance(value, list):
        return not value or not all(isinstance(v, (Tensor, Mapping, tuple, list)) for v in value)
    return isinstance(value, Mapping) and not isinstance(value, dict)


def batch_length(batch: Batch) -> int:
    """Count the examples of a batch: the length of its first column that has one."""
    sized = (leaf for _, leaf in columns(batch) if _is_sized(leaf))
    return len(next(sized, ()))


def _is_sized(column: Any) -> bool:
    return column.ndim > 0 if isinstance(column, Tensor) else hasattr(column, "__len__")


def take(batch: Batch, rows: Sequence[int] | Tensor | slice) -> Batch:
    """Take rows of a batch; tensors, lists of strings and nestings of them keep their kind."""

    def rows_of(column: Any) -> Any:
        if isinstance(column, Tensor):
            index = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long)
            return column[index] if column.ndim else column
        if not isinstance(column, (list, tuple)):
            return column
        return column[rows] if isinstance(rows, slice) else [column[int(row)] for row in rows]

    return map_columns(rows_of, batch)


def join(
    batches: Sequence[Batch], *, like: Sequence[Batch] = (), pad_id: int | None = None
) -> Batch:
    """Join batches to one; sequences of different length are padded on the right.

    Args:
        batches: Batches of one kind.
        like: More of them, in which the value of padding may be seen.
        pad_id: The token that pads texts, when padding is seen nowhere.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(even(batches, 0))
    if isinstance(first, Mapping):
        return {
            key: torch.cat(
                even_columns(batches, key, label=key in LABEL_KEYS, like=like, pad_id=pad_id)
            )
            if isinstance(first[key], Tensor)
            else join([b[key] for b in batches])
            for key in first
        }
    if isinstance(first, tuple) or not _is_column(first):
        inputs = [join([b[0] for b in batches], like=[b[0] for b in like], pad_id=pad_id)]
        labels = [[b[i] for b in batches] for i in range(1, len(first))]
        return (*inputs, *(_join_labels(column) for column in labels))
    return [item for batch in batches for item in batch]


def _join_labels(columns: Sequence[Any]) -> Any:
    """Join what stands beside the inputs; tokens that are padding have a label that is ignored."""
    tokens = isinstance(columns[0], Tensor) and not columns[0].is_floating_point()
    return torch.cat(even(columns, IGNORED)) if tokens else join(columns)


def labels_of(batch: Batch) -> Tensor | None:
    """Return a batch's labels, or None."""
    labels: Any = None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        labels = batch[1]
    elif isinstance(batch, Mapping):
        labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    return None if labels is None else torch.as_tensor(labels)


def without_labels(batch: Batch) -> Batch:
    """Drop a batch's labels: those of outliers mean nothing to the host's classes."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABEL_KEYS}
    return (batch[0],) if isinstance(batch, (tuple, list)) else batch


def images_of(batch: Batch) -> Tensor | None:
    """Return a batch's images `[batch, channel, height, width]`, or None when it holds none."""
    found = _image_slot(batch)
    return None if found is None else found[1]


def with_images(batch: Batch, images: Tensor) -> Batch:
    """Return the batch with its images replaced."""
    slot = _image_slot(batch)
    if slot is None:
        raise DataError(f"Expected a batch of images; {describe(batch)}.")
    if slot[0] is None:
        return images
    if isinstance(batch, Mapping):
        return {**batch, slot[0]: images}
    inner = images if isinstance(batch[0], Tensor) else with_images(batch[0], images)
    return (inner, *batch[1:])


def describe(batch: Batch) -> str:
    """Say in a few words what a batch holds, for errors."""
    if isinstance(batch, Mapping):
        return "found a mapping of " + ", ".join(f"{k} {_shape(v)}" for k, v in batch.items())
    if isinstance(batch, (tuple, list)):
        return f"found a {type(batch).__name__} of " + ", ".join(_shape(v) for v in batch)
    return f"found {_shape(batch)}"


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

    def subset(self, rows: Iterable[int], *, batch_size: int | None = None) -> Batches:
        """Return the examples at these positions, in this order."""
        chosen = [self.indices[row] for row in rows]
        return Batches(
            self._load,
            chosen,
            batch_size=batch_size or self.batch_size,
            labels=self._all_labels,
            info=self.info,
        )


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
        raise IndexError(f"Batch {number + len(self)} of {len(self)}.")


class Mapped:
    """Data with a function over every batch; `start` makes it at each pass, so seeds start anew."""

    def __init__(self, data: Data, start: Callable[[], Callable[[Batch], Batch]]) -> None:
        self.data, self._start = check_reiterable(data), start

    def __iter__(self) -> Iterator[Batch]:
        function = self._start()
        for batch in self.data:
            yield function(batch)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]


def as_data(source: Any, *, batch_size: int = 32) -> Data:
    """Make data of a dataset, a loader, a list of batches, or of one large batch in memory.

    Args:
        source: a `DataLoader` or a list of batches (returned as they are); a map-style dataset
            whose items are tensors, `(input, label)` or mappings; one batch: a tensor, a mapping
            of tensors or a tuple `(inputs, labels)`, which is cut into batches.
        batch_size: examples per batch, where we make the batches.
    """
    if isinstance(source, (Tensor, Mapping, tuple)):
        count = batch_length(source)
        return Batches(
            lambda rows: take(source, _as_slice(rows)),
            range(count),
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
            f"Found a {type(data).__name__} in place of data; expected a DataLoader, a list of "
            "batches or any other re-iterable of batches. as_data(...) makes one of a dataset."
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
    ends = list(accumulate(batch_length(batch) for batch in batches))
    like = padded_one(batches)

    def load(rows: Sequence[int]) -> Batch:
        runs: list[tuple[int, list[int]]] = []
        for row in rows:
            index = bisect_right(ends, row)
            local = row - (ends[index - 1] if index else 0)
            if runs and runs[-1][0] == index:
                runs[-1][1].append(local)
            else:
                runs.append((index, [local]))
        parts = [take(batches[index], _as_slice(local)) for index, local in runs]
        return join(parts, like=like, pad_id=pad_id)

    labels = [labels_of(batch) for batch in batches]
    known = [label for label in labels if label is not None]
    return Batches(
        load,
        range(ends[-1]),
        batch_size=max(batch_length(batch) for batch in batches),
        labels=torch.cat(even(known, IGNORED)) if len(known) == len(batches) else None,
    )


def _as_slice(rows: Sequence[int]) -> Sequence[int] | slice:
    """Return a slice for consecutive rows: a view in place of a copy."""
    if rows and all(after == before + 1 for before, after in pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return rows


def _image_slot(batch: Batch) -> tuple[str | int | None, Tensor] | None:
    def is_image(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()

    if isinstance(batch, Tensor):
        return (None, batch) if is_image(batch) else None
    if isinstance(batch, Mapping):
        for key in (*(k for k in IMAGE_KEYS if k in batch), *batch):
            if is_image(batch[key]):
                return key, batch[key]
        return None
    if isinstance(batch, (tuple, list)) and batch:
        inner = _image_slot(batch[0])
        return None if inner is None else (0, inner[1])
    return None


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)
