"""Batches: read, check, move, take and join them; and what a model returns for one.

A *batch* is what the host takes: a mapping with an optional `labels`, `(inputs, labels)`, or the
inputs only. Where the labels are spans, the mapping has `start_positions` and `end_positions`, and
labels are `[batch, 2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..answer_each import is_out_of_memory
from ..errors import DataError, HydraError, UnsupportedModelError
from ..tasks import tasks
from ..tasks.task import LOGITS
from .padding import IGNORED, even, even_columns

Batch = Any
Unchecked = tuple[str, Tensor, Tensor]
"""The name of an input, the input, and whether its sum is finite."""
LABEL_KEYS = ("labels", "label")
SPAN_KEYS = ("start_positions", "end_positions")
"""Keys of labels that are spans, as transformers has them."""
IMAGE_KEYS = ("pixel_values", "image", "images", "inputs", "x")


def map_columns(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Apply a function to every column of a batch; mappings become dicts.

    A batch is a tree (torch's pytree) of mappings, tuples and lists whose leaves are columns:
    tensors, lists of strings, or single values that go along.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # a tokenizer's BatchEncoding is not a dict
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

    def step(key: Any) -> str:
        return f"[{key.idx}]" if isinstance(key, pytree.SequenceKey) else f".{key.key}"

    return [("".join(map(step, path)), leaf) for path, leaf in leaves]


def _is_column(value: Any) -> bool:
    # a DataLoader's default collate gives [inputs, labels] as a list; a list of strings is one
    # column
    if isinstance(value, list):
        return not value or not all(isinstance(v, (Tensor, Mapping, tuple, list)) for v in value)
    return isinstance(value, Mapping) and not isinstance(value, dict)


def batch_length(batch: Batch) -> int:
    """Count the examples of a batch: the length of its first column that has one."""
    for _, column in columns(batch):
        if column.ndim if isinstance(column, Tensor) else hasattr(column, "__len__"):
            return len(column)
    return 0


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
        return (
            *inputs,
            *(
                torch.cat(even(column, IGNORED))  # the label of padding is ignored
                if isinstance(column[0], Tensor) and not column[0].is_floating_point()
                else join(column)
                for column in labels
            ),
        )
    return [item for batch in batches for item in batch]


def labels_of(batch: Batch) -> Tensor | None:
    """Return a batch's labels, or None."""
    labels: Any = None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        labels = batch[1]
    elif isinstance(batch, Mapping):
        labels = _labels_in(batch)
    return None if labels is None else torch.as_tensor(labels)


def _labels_in(batch: Mapping[str, Any]) -> Any:
    """Return what a mapping holds as labels, or None."""
    found = next((batch[key] for key in LABEL_KEYS if batch.get(key) is not None), None)
    if found is None and all(batch.get(key) is not None for key in SPAN_KEYS):
        found = torch.stack([torch.as_tensor(batch[key]).reshape(-1) for key in SPAN_KEYS], 1)
    return found


def without_labels(batch: Batch) -> Batch:
    """Drop a batch's labels: those of outliers mean nothing to the host's classes."""
    if isinstance(batch, Mapping):
        return {key: v for key, v in batch.items() if key not in (*LABEL_KEYS, *SPAN_KEYS)}
    return (batch[0],) if isinstance(batch, (tuple, list)) else batch


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """Split a batch into positional inputs, keyword inputs and labels (None without).

    A model is called without labels; with them a host would compute a loss that nobody needs.
    """
    labels: Any = None
    if isinstance(batch, (tuple, list)):
        if not 1 <= len(batch) <= 2:
            raise DataError(
                f"A batch is a {type(batch).__name__} of {len(batch)} things; expected "
                "(inputs, labels), (inputs,) or a mapping with an optional 'labels'."
            )
        if len(batch) == 2:
            labels = batch[1]
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return (batch,), {}, None if labels is None else torch.as_tensor(labels)
    inputs = {str(k): value for k, value in batch.items() if k not in (*LABEL_KEYS, *SPAN_KEYS)}
    labels = _labels_in(batch) if labels is None else labels
    return (), inputs, None if labels is None else torch.as_tensor(labels)


def is_host_batch(batch: Any, main_input: str) -> bool:
    """Return whether a batch is certainly what a host takes; quick, as it is asked often.

    Args:
        batch: What may also be raw: texts, images, paths, a frame.
        main_input: Name of the host's main input.
    """
    if not isinstance(batch, Mapping):
        return isinstance(batch, Tensor)
    if "pixel_values" in batch and main_input != "pixel_values":
        return False
    return all(isinstance(value, Tensor) for value in batch.values())


def read_batch(
    batch: Batch,
    device: torch.device | str | None = None,
    *,
    where: str = "the batch",
    unchecked: list[Unchecked] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """Split a batch, check its inputs and move them to a device, each once.

        args, kwargs, labels = read_batch({"pixel_values": images, "labels": y}, "cuda")
        model(*args, **kwargs)

    Args:
        batch: What the host takes, with or without labels.
        device: Device of the inputs; None leaves them where they are. Labels are not moved.
        where: Where the batch is from, for errors.
        unchecked: Takes the inputs that are on a device already; `check_finite` looks at them when
            the answer is there. To look at once would wait for all that the device has to do.
    """
    args, kwargs, labels = split_batch(batch)
    _check(args, kwargs, where, unchecked)
    return move(args, device), move(kwargs, device), labels


def check_inputs(batch: Any, where: str = "the batch") -> None:
    """Raise when a batch holds no examples, or NaN or infinite inputs.

    Attention masks and biases may be infinite; labels are not checked here.
    """
    args, kwargs, _ = split_batch(batch)
    _check(args, kwargs, where)


def _check(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    where: str,
    unchecked: list[Unchecked] | None = None,
) -> None:
    given = []
    for name, value in [*(("inputs", arg) for arg in args), *kwargs.items()]:
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        if not value.numel():
            raise DataError(
                f"There is nothing to predict in {where}: {name} has shape {list(value.shape)}. "
                "Give at least one example, and texts of at least one token."
            )
        if not value.is_floating_point() or "mask" in name or "bias" in name:
            continue
        given.append((name, value, value.detach().float().sum().isfinite()))
    if unchecked is not None:
        unchecked += [entry for entry in given if entry[1].device.type != "cpu"]
        given = [entry for entry in given if entry[1].device.type == "cpu"]
    check_finite(given, where)


def check_finite(given: Sequence[Unchecked], where: str = "the batch") -> None:
    """Raise when inputs hold NaN or infinite values, with one look at the device for all."""
    flags = [finite.to(given[0][2].device) for *_, finite in given]
    if not flags or bool(torch.stack(flags).all()):
        return  # where the sum is finite, every value is
    for name, value, _ in given:
        finite = value.detach().isfinite().reshape(len(value), -1).all(1)
        bad = (~finite).nonzero().flatten().tolist()
        if bad:
            kind = "NaN" if bool(value.isnan().any()) else "infinite values"
            raise DataError(
                f"The inputs hold {kind} for {len(bad)} of {len(value)} examples in {where} "
                f"({name}; example {bad[0]} is the first). Fix or remove these examples, and check "
                "how they were normalised."
            )


def main_output(output: Any, fields: Sequence[Sequence[str]] = ()) -> Tensor:
    """Return the tensor that a model's task reads in its output, `[batch, ...]`.

    Args:
        output: A tensor, an object or mapping with fields, or a tuple whose first entry counts.
        fields: `Task.fields`; by default those of any task.
    """
    if isinstance(output, Tensor):
        return output
    for names in fields or FIELDS:
        parts = [_field(output, name) for name in names]
        read = [_as_tokens(name, part) for name, part in zip(names, parts, strict=True)]
        found: list[Tensor] = [part for part in read if isinstance(part, Tensor)]
        if len(found) == len(parts):
            if len(found) == 1:
                return found[0]
            axes = max(3, *(part.ndim for part in found))
            return torch.cat([p if p.ndim == axes else p[:, None] for p in found], 1)
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    expected = " or ".join(" and ".join(f".{name}" for name in names) for names in fields or FIELDS)
    raise UnsupportedModelError(
        f"The model returned {type(output).__name__}: expected a tensor or an object with "
        f"{expected}."
    )


FIELDS: tuple[tuple[str, ...], ...] = tuple(
    dict.fromkeys([*LOGITS, *(other for name in tasks for other in tasks[name].fields)])
)
"""What the tasks read, in turn; logits first, since classifiers may give embeddings beside them."""


def put_output(output: Any, value: Tensor, fields: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Return the host's fields that hold a value of the form of `main_output`, by name."""
    names = next(n for n in fields if all(isinstance(_field(output, x), Tensor) for x in n))
    parts = [_field(output, name) for name in names]
    tokens = [_as_tokens(name, part) for name, part in zip(names, parts, strict=True)]
    rows = [part.shape[1] if part.ndim == value.ndim else 1 for part in tokens]
    new = dict(zip(names, [value] if len(names) == 1 else value.split(rows, 1), strict=True))
    for name, part, read in zip(names, parts, tokens, strict=True):
        if read is not part:  # a map again
            new[name] = new[name].transpose(1, 2).unflatten(2, part.shape[2:])
        elif part.ndim < value.ndim:
            new[name] = new[name][:, 0]
    return new


def _as_tokens(name: str, part: Any) -> Any:
    """Return the map of features that an image encoder gives, `[batch, width, y, x]`, as tokens."""
    is_map = name == "last_hidden_state" and isinstance(part, Tensor) and part.ndim == 4
    return part.flatten(2).transpose(1, 2) if is_map else part


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def images_of(batch: Batch) -> Tensor | None:
    """Return a batch's images `[batch, channel, height, width]`, or None when it holds none."""
    if isinstance(batch, (tuple, list)):
        return images_of(batch[0]) if batch else None
    if isinstance(batch, Mapping):
        key = _image_key(batch)
        return None if key is None else batch[key]
    return batch if _is_images(batch) else None


def with_images(batch: Batch, images: Tensor) -> Batch:
    """Return the batch with its images replaced."""
    if images_of(batch) is None:
        raise DataError(f"Expected a batch of images; {describe(batch)}.")
    if isinstance(batch, (tuple, list)):
        return (with_images(batch[0], images), *batch[1:])
    return {**batch, _image_key(batch): images} if isinstance(batch, Mapping) else images


def _image_key(batch: Mapping[str, Any]) -> str | None:
    keys = (*(key for key in IMAGE_KEYS if key in batch), *batch)
    return next((key for key in keys if _is_images(batch[key])), None)


def _is_images(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()


def refused_inputs(
    model: Any, batch: Batch, error: BaseException, where: str = "its inputs"
) -> BaseException:
    """Return the error to raise where a model failed on its inputs; ours, or that of a full memory.

    `Halving` looks for the latter, which stays as it is.
    """
    if isinstance(error, HydraError) or is_out_of_memory(error):
        return error
    return DataError(
        f"{type(model).__name__} failed on {where} ({describe(batch)}): {str(error).rstrip('.')}. "
        "The data must be prepared as the model expects it."
    )


def describe(batch: Batch) -> str:
    """Return in a few words what a batch holds, for errors."""

    def shape(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {list(value.shape)}"
        kind = type(value).__name__
        return f"{kind} of {len(value)}" if hasattr(value, "__len__") else repr(value)

    if isinstance(batch, Mapping):
        return "found a mapping of " + ", ".join(f"{k} {shape(v)}" for k, v in batch.items())
    if isinstance(batch, (tuple, list)):
        return f"found a {type(batch).__name__} of " + ", ".join(map(shape, batch))
    return f"found {shape(batch)}"
