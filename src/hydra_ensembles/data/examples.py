"""Examples as people have them, read as columns: lists, pairs, tables, frames and data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import DataError
from .batches import LABEL_KEYS
from .loaders import Batches
from .text_files import TEXT_COLUMNS

INPUT = ""
"""The column of inputs that have no name."""
PREPARED = {"input_ids": 1, "pixel_values": 3, "input_values": 1, "input_features": 2}
"""Columns of prepared inputs, with the number of axes of one example."""
COLUMNS = (*PREPARED, *TEXT_COLUMNS, "image", "images", "file", "path")
PLACES = 1000
"""Rows of a data set that one reading of a whole column asks for."""


@dataclass(frozen=True)
class Examples:
    """Examples in columns, read by row.

    Attributes:
        what: What was found, for errors.
        count: Number of rows.
        names: The columns; `INPUT` for inputs without a name.
        read: Returns the columns of some rows.
        column: Returns one whole column; None where that would read every input.
        class_names: Names of the labels' numbers, where the data has them.
    """

    what: str
    count: int
    names: tuple[str, ...]
    read: Callable[[Sequence[int]], dict[str, list[Any]]]
    column: Callable[[str], list[Any]] | None = None
    class_names: Callable[[str], Sequence[str] | None] = lambda name: None

    def whole(self, name: str) -> list[Any]:
        """Return a whole column, by reading every row if need be."""
        return self.column(name) if self.column else self.read(range(self.count))[name]


def examples_of(source: Any, name: str = "data") -> Examples | None:
    """Return what a source holds, example by example; None for batches.

    Args:
        source: Texts, images or paths, with labels as `(inputs, labels)` or as pairs; mappings of
            columns; a list of mappings; a frame; a data set of `datasets` or of torch.
        name: Of the data, for errors.
    """
    if isinstance(source, (Batches, DataLoader, Tensor, nn.Module)):
        return None
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return _of_dataset(source)
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # a frame
        names = [str(column) for column in source.columns]
        values = {str(column): list(source[column]) for column in source.columns}
        return _of_columns(values, f"a {type(source).__name__} with the columns {_list(names)}")
    if isinstance(source, Mapping):
        return _of_mapping(source, name)
    if isinstance(source, tuple) and len(source) == 2 and _are_inputs_and_labels(*source):
        return _of_pair(*source, name)
    if isinstance(source, (list, tuple)) or (
        isinstance(source, np.ndarray) and source.dtype.kind in "UO"
    ):
        return _of_list(list(source), name)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not _is_array(source):
        return _of_torch(source)
    return None


def is_one_set(source: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is one data set, in columns or as a batch, and not sets by name."""
    if source and all(isinstance(value, Tensor) for value in source.values()):
        return True
    columns = [values for name, values in source.items() if name in COLUMNS]
    return any(
        isinstance(v, (list, tuple)) and v and not isinstance(v[0], (tuple, Mapping, Tensor))
        for v in columns
    )


def is_raw(batch: Any) -> bool:
    """Return whether a batch is an image, path, text, pair or question, or a list of them.

    A pair is a mapping with the texts `text` and `text_pair`, a question one with `question` and
    `context`.
    """
    if isinstance(batch, (list, tuple)) and batch:
        return all(_is_raw_item(item) for item in batch)
    return _is_raw_item(batch)


def is_image(item: Any) -> bool:
    """Return whether an input is an image: PIL's, pixels `[H, W, 3]`, or as `datasets` keeps it."""
    if isinstance(item, Mapping):
        return set(item) == {"bytes", "path"}
    pixels = isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3)
    return pixels or (hasattr(item, "convert") and hasattr(item, "getbands"))


def is_question(item: Any) -> bool:
    """Return whether an input is a question: a mapping with the texts `question` and `context`."""
    return isinstance(item, Mapping) and isinstance(item.get("question"), str)


def is_pair(item: Any) -> bool:
    """Return whether an input is two texts: a mapping with nothing but `text` and `text_pair`."""
    return isinstance(item, Mapping) and set(item) == {"text", "text_pair"}


def is_path(item: Any) -> bool:
    """Return whether an input is a path, or a string that may be one."""
    return isinstance(item, (str, os.PathLike))


def is_prepared(batch: Mapping[str, Any]) -> bool:
    """Return whether a mapping holds inputs that a host takes, of several examples."""
    return any(name in batch for name in PREPARED) and _is_batch(batch)


def rows_of(values: Any) -> Any:
    """Return a column as a list of its rows; anything else stays as it is."""
    if hasattr(values, "ndim") and hasattr(values, "tolist") and values.ndim < 2:
        return values.tolist()
    return list(values) if isinstance(values, Sequence) or hasattr(values, "__array__") else values


def is_example(item: Any) -> bool:
    """Return whether an item of a list is one example, and no batch."""
    if isinstance(item, Mapping):
        return not _is_batch(item)
    if isinstance(item, (tuple, list)) and len(item) == 2:
        value, label = item
        if _is_raw_item(value):  # a list of two texts is a batch of them
            return isinstance(item, tuple) or not isinstance(label, str)
        return _is_scalar(label) and not _is_scalar(value)
    if isinstance(item, (tuple, list)) and len(item) == 1:
        return _is_raw_item(item[0]) and isinstance(item, tuple)
    return _is_raw_item(item)


def _is_raw_item(item: Any) -> bool:
    return is_path(item) or is_image(item) or is_question(item) or is_pair(item)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _is_scalar(value: Any) -> bool:
    if _is_array(value):
        return bool(value.ndim == 0)
    return isinstance(value, (str, int, float, np.generic))


def _is_batch(columns: Mapping[str, Any]) -> bool:
    """Return whether the columns of a mapping hold several examples."""
    for name, axes in PREPARED.items():
        if name in columns:
            value = columns[name]
            if _is_array(value):  # patches of images, which come with their mask, have two axes
                return bool(value.ndim > (2 if "pixel_attention_mask" in columns else axes))
            return isinstance(value, (list, tuple)) and len(value) > 0 and not _is_scalar(value[0])
    return not any(_is_scalar(v) or is_image(v) for v in columns.values())


def _are_inputs_and_labels(inputs: Any, labels: Any) -> bool:
    """Return whether a tuple is `(inputs, labels)` in which the inputs are not a batch."""
    if isinstance(inputs, Tensor) or (isinstance(inputs, Mapping) and _has_tensors(inputs)):
        return False
    several = isinstance(inputs, (Mapping, list, tuple, np.ndarray)) or hasattr(inputs, "tolist")
    of_labels = isinstance(labels, (list, tuple)) or hasattr(labels, "tolist")
    if not several or not of_labels or not len(labels) or isinstance(labels[0], Mapping):
        return False
    return not (isinstance(labels[0], Tensor) and labels[0].ndim)  # two batches of a loader


def _has_tensors(columns: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Tensor) and v.ndim for k, v in columns.items() if k not in LABEL_KEYS)


def _of_mapping(source: Mapping[str, Any], name: str) -> Examples | None:
    if not source:
        raise DataError(f"The {name} data is empty: it is a mapping without columns.")
    if all(
        hasattr(value, "column_names") or hasattr(value, "to_dict") for value in source.values()
    ):
        raise DataError(
            f"The {name} data has several splits ({_list(source)}): pass one of them, such as "
            f"data[{next(iter(source))!r}]."
        )
    lists = [v for v in source.values() if isinstance(v, (list, tuple)) and len(v)]
    raw = any(_is_raw_item(v[0]) for v in lists)
    tensors = any(isinstance(value, Tensor) and value.ndim for value in source.values())
    if (tensors and not raw) or not _is_batch(source):
        return None
    if not all(isinstance(v, (list, tuple, np.ndarray, Tensor)) for v in source.values()):
        return None
    columns = {str(column): list(values) for column, values in source.items()}
    return _of_columns(columns, f"a mapping with the columns {_list(columns)}", name)


def _of_pair(inputs: Any, labels: Any, name: str) -> Examples:
    columns = _of_mapping(inputs, name) if isinstance(inputs, Mapping) else None
    if columns is not None:
        values = columns.read(range(columns.count))
    else:
        values = {INPUT: list(inputs)}
    values["labels"] = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    return _of_columns(values, f"({_items(next(iter(values.values())))}, labels)", name)


def _of_list(items: list[Any], name: str) -> Examples | None:
    if not items:
        raise DataError(
            f"The data set {name!r} is empty: it has no batches and no examples. If it comes from "
            "a generator, that may have been used up before."
        )
    if not is_example(items[0]):
        return None
    rows = [_row(item) for item in items]
    different = next((number for number, row in enumerate(rows) if set(row) != set(rows[0])), None)
    if different is not None:
        raise DataError(
            f"Example {different} of the {name} data has {_list(rows[different]) or 'no label'}, "
            f"but example 0 has {_list(rows[0])}: give every example the same parts."
        )
    columns = {column: [row[column] for row in rows] for column in rows[0]}
    return _of_columns(columns, _items(items), name)


def _of_columns(columns: dict[str, list[Any]], what: str, name: str = "data") -> Examples:
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{count} {column or 'inputs'}" for column, count in lengths.items())
        raise DataError(f"The {name} data has columns of different lengths: {told}.")
    count = next(iter(lengths.values()), 0)
    if not count:
        raise DataError(f"The {name} data is empty: found {what} without a row.")

    def read(rows: Sequence[int]) -> dict[str, list[Any]]:
        return {column: [values[row] for row in rows] for column, values in columns.items()}

    return Examples(what, count, tuple(columns), read, columns.__getitem__)


def _of_dataset(source: Any) -> Examples | None:
    """Read a data set of the library `datasets`; None for a stream of one."""
    if not hasattr(source, "__len__"):
        return None
    if not len(source):
        raise DataError("The data set has no rows.")
    if source.format["type"] == "custom":  # with_transform(): only its rows say what they hold
        return _of_torch(source)
    if any(type(kind).__name__ == "Image" for kind in (source.features or {}).values()):
        source = source.with_format(None)  # images, not pixels that nobody has prepared
    names = tuple(source.column_names)

    def column(name: str) -> list[Any]:
        part, found = source.select_columns([name]), []
        for start in range(0, len(source), PLACES):
            found += list(part[start : start + PLACES][name])
        return found

    return Examples(
        f"a data set with the columns {_list(names)}",
        len(source),
        names,
        lambda rows: {name: list(values) for name, values in source[list(rows)].items()},
        column,
        lambda name: getattr((source.features or {}).get(name), "names", None),
    )


def _of_torch(source: Any) -> Examples | None:
    """Read a map-style data set of torch; None where its items are batches."""
    count = len(source)
    if not count:
        raise DataError("The data set has no items.")
    first = source[0]
    if not (is_example(first) or isinstance(first, (Tensor, tuple))):
        return None

    def read(rows: Sequence[int]) -> dict[str, list[Any]]:
        found = [_row(source[int(row)]) for row in rows]
        return {name: [row[name] for row in found] for name in found[0]}

    what = f"a {type(source).__name__} of {_kind(first)}"
    return Examples(what, count, tuple(_row(first)), read)


def _row(item: Any) -> dict[str, Any]:
    """Return the parts of one example by name."""
    if isinstance(item, Mapping) and not is_image(item):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {**_row(item[0]), "labels": item[1]}
    if isinstance(item, tuple) and len(item) == 1:
        return _row(item[0])
    return {INPUT: item}


def _items(items: Sequence[Any]) -> str:
    return f"a list of {len(items)} {_kind(items[0])}"


def _kind(item: Any) -> str:
    """Say what one example is."""
    if isinstance(item, str):
        return "strings"
    if isinstance(item, os.PathLike):
        return "paths"
    if isinstance(item, (tuple, list)) and item and not _is_scalar(item[0]):
        return f"pairs ({_kind(item[0])}, {type(item[-1]).__name__})"
    if is_image(item):
        return "images"
    if isinstance(item, Mapping):
        return f"mappings with {_list(item)}"
    if isinstance(item, (tuple, list)):
        return f"pairs ({', '.join(type(part).__name__ for part in item)})"
    if _is_array(item):
        return f"arrays {list(item.shape)}"
    return f"{type(item).__name__}s"


def _list(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names)


def tensor_column(
    values: Sequence[Any], *, pad: float = 0, name: str = "inputs"
) -> tuple[Tensor, list[int] | None]:
    """Stack a column of numbers; rows of different lengths are padded on the right.

    Returns:
        The column, and the rows' lengths where they differ.
    """
    try:
        rows = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"The column {name!r} does not hold numbers: found {values[0]!r:.60}."
        ) from error
    rows = [row.float() if row.dtype == torch.float64 else row for row in rows]
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) == 1:
        return torch.stack(rows), None
    if len({shape[1:] for shape in shapes}) > 1 or rows[0].is_floating_point():
        raise DataError(
            f"The examples of {name!r} have different shapes ({sorted(shapes)[:3]}): only "
            "sequences of tokens can be padded. Give images of one size."
        )
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad), [
        len(row) for row in rows
    ]
