"""The batches of each epoch, in an order that depends only on the seed and the epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..data.batches import batch_length, columns, join, split_batch, take
from ..data.loaders import Batches
from ..errors import DataError


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a pure function of `parts` (the same on every machine)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a fresh CPU generator seeded by `parts`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


class Stream:
    """Re-iterable batches in a seeded order, independent of any global state.

    How far the order can be shuffled depends on the type of the data:

    * a list or tuple of batches whose tensors differ only in the batch dimension: in each epoch the
      samples are pooled and dealt into new batches, as large as the largest;
    * a list or tuple of other batches (padded to their own lengths, say): the order of the batches
      is shuffled, not their content;
    * a `DataLoader` over a map-style data set, or `Batches`: it gets a seeded sampler;
    * anything else is iterated as it is; its `set_epoch`, if any, is called first.

    A bootstrap draws as many samples as there are, with replacement. It is drawn once per seed and
    is the same in all epochs. Where samples cannot be pooled it is stratified by batch.

    Args:
        data: Any re-iterable of batches.
        seed: Determines the order and the bootstrap.
        shuffle: Whether to change the order of the data.
        bootstrap: Whether to resample the data with replacement.
    """

    def __init__(
        self,
        data: Iterable[Any],
        *,
        seed: int,
        shuffle: bool = True,
        bootstrap: bool = False,
    ) -> None:
        if isinstance(data, Iterator):
            raise DataError(
                f"The data is a {type(data).__name__}, which can be read only once. "
                "Pass something that can be iterated again, such as a list or a DataLoader."
            )
        if isinstance(data, Batches) and (shuffle or bootstrap):
            data = _as_loader(data)
        self.data, self.seed, self.shuffle, self.bootstrap = data, seed, shuffle, bootstrap
        in_memory = isinstance(data, (list, tuple))
        self.pool = pool(data) if in_memory and (shuffle or bootstrap) else None  # type: ignore[arg-type]
        self.seedable = isinstance(data, DataLoader) and _is_seedable(data)
        if bootstrap and not (in_memory or self.seedable):
            raise DataError(
                f"bootstrap=True cannot resample a {type(data).__name__}. Pass a list of batches, "
                "or a DataLoader over a map-style data set without a custom sampler."
            )
        if self.pool is None:
            try:
                self._length = len(data)  # type: ignore[arg-type]
            except TypeError:  # the schedule needs the number of steps: count in one pass
                self._length = sum(1 for _ in data)
        else:
            self.batch_size = max(batch_length(batch) for batch in data)
            self._length = -(-batch_length(self.pool) // self.batch_size)
        if self._length == 0:
            raise DataError("The training data has no batches. Check the loader or the filter.")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._length

    def epoch(self, index: int) -> Iterator[Any]:
        """Iterate over the batches of epoch `index`."""
        if self.pool is not None:
            order = self._sample_order(batch_length(self.pool), index)
            return (take(self.pool, rows) for rows in order.split(self.batch_size))
        if self.seedable:
            return iter(self._reseeded(index))
        if isinstance(self.data, (list, tuple)):
            return self._reordered(index)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(index)
        return iter(self.data)

    def _sample_order(self, count: int, epoch: int) -> Tensor:
        samples = torch.arange(count)
        if self.bootstrap:
            samples = torch.randint(count, (count,), generator=generator("bootstrap", self.seed))
        if self.shuffle:
            samples = samples[torch.randperm(count, generator=generator(self.seed, epoch))]
        return samples

    def _reordered(self, epoch: int) -> Iterator[Any]:
        assert isinstance(self.data, Sequence)
        order = torch.arange(len(self.data))
        if self.shuffle:
            order = torch.randperm(len(self.data), generator=generator(self.seed, epoch))
        for position in order.tolist():
            batch = self.data[position]
            if self.bootstrap:
                size = batch_length(batch)
                draw = generator("bootstrap", self.seed, position)
                batch = take(batch, torch.randint(size, (size,), generator=draw))
            yield batch

    def _reseeded(self, epoch: int) -> DataLoader[Any]:
        assert isinstance(self.data, DataLoader)
        order = self._sample_order(len(self.data.dataset), epoch)  # type: ignore[arg-type]
        return loader_like(self.data, sampler=order.tolist(), drop_last=self.data.drop_last)


def loader_like(
    loader: DataLoader[Any],
    dataset: Any = None,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    sampler: Sequence[int] | None = None,
    drop_last: bool,
) -> DataLoader[Any]:
    """Return a loader with the options of another: over its data in order, unless given."""
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=loader.num_workers,
        collate_fn=collate_fn or loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def _as_loader(data: Batches) -> DataLoader[Any]:
    """Return a loader over the examples of `Batches`, whose order can be chosen."""
    return DataLoader(
        range(data.count),  # type: ignore[arg-type]
        batch_size=data.batch_size,
        collate_fn=partial(_from_batches, data),
    )


def _from_batches(data: Batches, numbers: Sequence[int]) -> Any:
    """Load the numbered examples as one batch (loader workers may unpickle this function)."""
    return next(iter(data.subset(numbers, batch_size=len(numbers))))


def _is_seedable(loader: DataLoader[Any]) -> bool:
    """Return whether the loader uses a standard sampler, which we may replace."""
    return (
        loader.batch_size is not None
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (RandomSampler, SequentialSampler)
    )


def pool(batches: Sequence[Any]) -> Any | None:
    """Return all samples as one batch, or None if the batches cannot be joined."""
    signatures = set()
    for batch in batches:
        leaves = columns(batch)
        if not all(isinstance(leaf, Tensor) and leaf.ndim for _, leaf in leaves):
            return None
        if len({len(leaf) for _, leaf in leaves}) != 1:
            return None
        signatures.add(tuple((path, leaf.shape[1:], leaf.dtype) for path, leaf in leaves))
    if len(signatures) != 1:
        return None
    return join(batches)


# Batches whose samples are numbered, so that cached results can be looked up per sample.
_KEYS = {"samples", "labels", "batch"}


def numbered(
    data: Iterable[Any], *, need_labels: bool = True, start: int = 0
) -> list[Any] | DataLoader[Any]:
    """Give every sample a number that stays with it however `Stream` shuffles.

    Args:
        data: A list of batches, `Batches`, or a `DataLoader` over a map-style data set.
        need_labels: Raise when a batch has no labels; otherwise its labels are zeros.
        start: Number of the first sample of a list.

    Returns:
        Data whose batches are dicts: `batch` as it was, its `labels`, and the numbers `samples`.
    """
    if isinstance(data, (list, tuple)):
        ends = accumulate((batch_length(batch) for batch in data), initial=start)
        return [
            _number(batch, torch.arange(first, end), need_labels)
            for batch, (first, end) in zip(data, pairwise(ends), strict=True)
        ]
    if isinstance(data, Batches):
        data = _as_loader(data)
    if isinstance(data, DataLoader) and _is_seedable(data):
        return loader_like(
            data,
            range(len(data.dataset)),  # type: ignore[arg-type]
            collate_fn=partial(_load, data.dataset, data.collate_fn, need_labels),
            drop_last=data.drop_last,
        )
    raise DataError(
        f"Samples of a {type(data).__name__} cannot be identified from pass to pass. Pass a list "
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
    labels = split_batch(batch)[2]
    if labels is None and need_labels:
        raise DataError("A batch has no labels. Give (inputs, labels), or dicts with 'labels'.")
    if labels is None:
        labels = torch.zeros(len(samples), dtype=torch.long)
    return {"samples": samples, "labels": labels, "batch": batch}


def _load(
    dataset: Any, collate: Callable[[Any], Any], need_labels: bool, numbers: Sequence[int]
) -> dict[str, Any]:
    """Load numbered examples (no closure: loader workers may unpickle it)."""
    batch = collate([dataset[number] for number in numbers])
    return _number(batch, torch.tensor(numbers), need_labels)
