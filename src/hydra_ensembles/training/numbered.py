"""Batches whose samples are numbered, so that cached results can be looked up per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.batches import Batches, batch_length, columns
from ..data.running import split_batch
from ..errors import DataError
from .stream import _is_seedable, from_batches

_KEYS = {"samples", "labels", "batch"}


def numbered(data: Iterable[Any], *, need_labels: bool = True) -> list[Any] | DataLoader[Any]:
    """Give every sample a number that stays with it however `Stream` shuffles.

    Args:
        data: A list of batches, `Batches`, or a `DataLoader` over a map-style data set.
        need_labels: Raise when a batch has no labels; otherwise its labels are zeros.

    Returns:
        Data whose batches are dicts: `batch` as it was, its `labels`, and the numbers `samples`.
    """
    if isinstance(data, (list, tuple)):
        result, start = [], 0
        for batch in data:
            size = batch_length(batch)
            result.append(_number(batch, torch.arange(start, start + size), need_labels))
            start += size
        return result
    if isinstance(data, Batches):
        return DataLoader(
            range(data.count),  # type: ignore[arg-type]
            batch_size=data.batch_size,
            collate_fn=partial(_load, partial(from_batches, data), need_labels),
        )
    if isinstance(data, DataLoader) and _is_seedable(data):
        return DataLoader(
            range(len(data.dataset)),  # type: ignore[arg-type]
            batch_size=data.batch_size,
            drop_last=data.drop_last,
            num_workers=data.num_workers,
            pin_memory=data.pin_memory,
            worker_init_fn=data.worker_init_fn,
            collate_fn=partial(
                _load, partial(_from_dataset, data.dataset, data.collate_fn), need_labels
            ),
        )
    raise DataError(
        f"Samples of a {type(data).__name__} cannot be told apart from pass to pass. Pass a list "
        "of batches, or a DataLoader over a map-style data set without a custom sampler."
    )


def is_numbered(batch: Any) -> bool:
    """Tell whether a batch was made by `numbered`."""
    return isinstance(batch, dict) and batch.keys() == _KEYS


def keys_of(batch: Any) -> list[tuple[Any, ...]]:
    """Name each sample by its number and its shapes, which padding may change."""
    leaves = [leaf for _, leaf in columns(batch["batch"]) if isinstance(leaf, Tensor)]
    shapes = tuple(leaf.shape[1:] for leaf in leaves)
    return [(number, shapes) for number in batch["samples"].tolist()]


def _number(batch: Any, samples: Tensor, need_labels: bool) -> dict[str, Any]:
    return {"samples": samples, "labels": _labels(batch, need_labels), "batch": batch}


def _labels(batch: Any, needed: bool) -> Tensor:
    labels = split_batch(batch)[2]
    if labels is None and not needed:
        return torch.zeros(batch_length(batch), dtype=torch.long)
    if labels is None:
        raise DataError("A batch has no labels. Give (inputs, labels), or dicts with 'labels'.")
    return labels


# Plain functions, not closures: a loader's workers may have to unpickle them.


def _load(
    load: Callable[[Sequence[int]], Any], need_labels: bool, numbers: Sequence[int]
) -> dict[str, Any]:
    return _number(load(numbers), torch.tensor(numbers), need_labels)


def _from_dataset(dataset: Any, collate: Callable[[Any], Any], numbers: Sequence[int]) -> Any:
    return collate([dataset[number] for number in numbers])
