"""Work on data that several processes share: batch i is done by process i mod n.

Batches do not depend on the number of processes, and every process gets all results in order.
Everything computed from them is therefore the same computation on the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .._tensors import tensor_bytes
from ..errors import DataError, HydraError
from . import processes
from .batches import Batches, Chained
from .splits import fingerprint

AHEAD = 8
"""Batches that a process runs before it exchanges results with the others."""

Result = dict[str, Tensor]


def in_order(
    data: Iterable[Any],
    work: Callable[[int, Any], Result],
    *,
    name: str = "data",
    ahead: int = AHEAD,
) -> Iterator[Result]:
    """Yield `work(index, batch)` of all batches, in their order, in every process.

    Each process runs its own share. An error in one is raised in all, at its batch.

    Args:
        data: Batches; every process passes the whole data, in the same order.
        work: Maps a batch to tensors by name.
        name: Name of the data set in errors.
        ahead: Batches that a process runs before it exchanges results.
    """
    if processes.size() == 1:
        for index, batch in enumerate(data):
            yield work(index, batch)
        return
    share = Share(data, name)
    first = 0
    while True:
        done, failure = _own(share, work, ahead)
        message = {
            "name": name,
            "indices": list(done),
            "failed": None if failure is None else failure[0],
            "error": None if failure is None else processes.describe_error(failure[1]),
            "hash": share.known["hash"],
        }
        tensors = {
            f"{i} {key}": value for i, result in done.items() for key, value in result.items()
        }
        heard = [
            processes.unpack(text) for text in processes.exchange(processes.pack(tensors, message))
        ]
        reports = [plain for _, plain in heard]
        _check_agreement(reports, name)
        results: dict[int, Result] = {i: {} for plain in reports for i in plain["indices"]}
        for tensors, _ in heard:
            for key, value in tensors.items():
                number, _, label = key.partition(" ")
                results[int(number)][label] = value
        failed = min((p for p in reports if p["failed"] is not None), key=_place, default=None)
        until = first + ahead * len(reports) if failed is None else failed["failed"]
        for place in range(first, until):
            if place not in results:
                break
            yield results[place]
        if failed is not None:
            if failure is not None and failure[0] == failed["failed"]:
                raise failure[1]
            raise processes.error_of(failed["error"])
        if len(results) < ahead * len(reports):
            _check_ends(share, name)
            return
        first = until


def _place(report: dict[str, Any]) -> int:
    return int(report["failed"])


def _own(
    share: Share, work: Callable[[int, Any], Result], ahead: int
) -> tuple[dict[int, Result], tuple[int, Exception] | None]:
    """Run the next batches of this process; stop at an error."""
    done: dict[int, Result] = {}
    for _ in range(ahead):
        try:
            item = next(share, None)
            if item is None:
                break
            done[item[0]] = work(*item)
        except Exception as error:  # sent to the other processes, so that all raise
            return done, (share.next_index, error)
        share.next_index += share.step
    return done, None


def _check_agreement(reports: list[dict[str, Any]], name: str) -> None:
    """Raise unless all processes read the same data, as far as known."""
    names = [plain["name"] for plain in reports]
    if len(set(names)) > 1:
        raise HydraError(
            f"The processes do different things: they read {', '.join(map(repr, names))}. Call the "
            "same functions with the same arguments in all of them."
        )
    hashes = {plain["hash"] for plain in reports if plain["hash"] is not None}
    if len(hashes) > 1:
        raise _different(name)


def _check_ends(share: Share, name: str) -> None:
    """Raise unless the data ended at the same place in all processes."""
    left = next(share, None)
    ends = processes.exchange_plain(share.known["batches"] if left is None else -1)
    if len(set(ends)) > 1 or ends[0] == -1:
        raise _different(name)


def _different(name: str) -> DataError:
    return DataError(
        f"The processes read different data as {name!r}: give every process the whole data in the "
        "same order (no DistributedSampler, shuffle=False or one seed). It is shared out here."
    )


class Share(Iterator[tuple[int, Any]]):
    """This process's batches of some data, with their places.

    Args:
        data: Batches.
        name: Name of the data set in errors.

    Attributes:
        known: What must be equal in all processes: `hash`, of the first batch, and `batches`, their
            number; None while unknown.
        next_index: Place of the next batch of this process.
    """

    def __init__(self, data: Iterable[Any], name: str) -> None:
        self.name = name
        self.step, self.next_index = processes.size(), processes.rank()
        self.known: dict[str, Any] = {"batches": None, "hash": None}
        self._items = self._items_of(data)

    def __next__(self) -> tuple[int, Any]:
        return next(self._items)

    def _items_of(self, data: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        if isinstance(data, DataLoader):
            order = _order_of(data, self.name)
            if order is not None:
                return self._of_loader(data, order)
        if isinstance(data, (Batches, Chained)):
            self.known = {"batches": len(data), "hash": _hash_of(data)}
            numbers = range(self.next_index, len(data), self.step)
            return ((number, data.batch(number)) for number in numbers)
        if isinstance(data, (list, tuple)):
            first = fingerprint(data[:1]) if data else None
            self.known = {"batches": len(data), "hash": first}
            numbers = range(self.next_index, len(data), self.step)
            return ((number, data[number]) for number in numbers)
        return self._of_stream(data)

    def _of_loader(
        self, loader: DataLoader[Any], order: list[list[int]]
    ) -> Iterator[tuple[int, Any]]:
        """Load only the batches of this process, in an order that the first process drew."""
        self.known = {"batches": len(order), "hash": None}
        numbers = range(self.next_index, len(order), self.step)
        mine = DataLoader(
            loader.dataset,
            batch_sampler=[order[number] for number in numbers],
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        return zip(numbers, mine, strict=True)

    def _of_stream(self, data: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Read everything and keep this process's batches: a stream cannot skip."""
        index = -1
        for index, batch in enumerate(data):
            if index == 0:
                self.known["hash"] = fingerprint([batch])
            if index % self.step == self.next_index % self.step:
                yield index, batch
        self.known["batches"] = index + 1


def own_numbers(count: int) -> range:
    """Return the indices of this process's batches among `count`."""
    return range(processes.rank(), count, processes.size())


def own_batches(data: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield this process's batches of data that was read before, with their places.

    Does not wait for other processes, and checks nothing.
    """
    if isinstance(data, (list, tuple, Batches)):
        load = data.batch if isinstance(data, Batches) else data.__getitem__
        yield from ((number, load(number)) for number in own_numbers(len(data)))
        return
    step, first = processes.size(), processes.rank()
    yield from ((i, batch) for i, batch in enumerate(data) if i % step == first)


def _order_of(loader: DataLoader[Any], name: str) -> list[list[int]] | None:
    """Return which examples each batch of a loader holds, as the first process draws them.

    None for loaders that do not say so: they are read as streams.
    """
    prepared = type(loader).__module__.startswith("accelerate.")
    if prepared or isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            f"The loader of {name!r} gives each process a share of the data already "
            f"({type(loader).__name__}, {type(loader.sampler).__name__}). Give the plain loader of "
            "the whole data: it is shared out here."
        )
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return None
    sampler = loader.batch_sampler
    order: list[list[int]] = processes.on_first(lambda: [[int(i) for i in b] for b in sampler])
    return order


def _hash_of(data: Batches | Chained) -> str:
    """Hash which examples data holds, without loading them."""
    total = hashlib.sha256()
    for part in data.parts if isinstance(data, Chained) else [data]:
        total.update(repr((part.batch_size, part.indices)).encode())
        if part.labels is not None:
            total.update(tensor_bytes(part.labels))
    return total.hexdigest()
