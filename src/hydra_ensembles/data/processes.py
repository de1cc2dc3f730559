"""Several processes that work as one: batch i is run by process i mod n, all get all results.

Under `torchrun` or `accelerate launch` every process runs the same program. The functions that run
a model over data (`evaluate`, `score_heads`, `build`, `distill`, ...) are called by all of them,
with the same arguments, and return the same result in each. Batches do not depend on the number of
processes and results come in the order of the batches (`in_order`), so everything computed from
them is the same computation on the same numbers. The first process writes the files.

Messages are objects by `torch.distributed`, which pickles them between the processes of one launch.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from .. import _records, _tensors, errors
from ..errors import DataError, HydraError
from .loaders import Batches, Chained
from .splits import fingerprint

AHEAD = 8
"""Batches that a process runs before it exchanges results with the others."""

Function = TypeVar("Function", bound=Callable[..., Any])
Result = dict[str, Tensor]
_alone: ContextVar[bool] = ContextVar("alone", default=False)
_side: dict[int, Any] = {}


def size() -> int:
    """Return the number of processes that work together; 1 for a single process."""
    return dist.get_world_size() if _together() else 1


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if _together() else 0


def is_first() -> bool:
    """Return whether this process is the one that writes files and reports."""
    return rank() == 0


def seems_first() -> bool:
    """Return the same from the environment, without waiting for other processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return not _launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run the block in this process only, independently of the others."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def _together() -> bool:
    """Return whether there is a process group; join the one that a launcher describes."""
    if _alone.get() or not dist.is_available() or get_worker_info() is not None:
        return False
    if not dist.is_initialized() and _launched():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return dist.is_initialized()


def _launched() -> bool:
    """Return whether a launcher has started several processes."""
    count = os.environ.get("WORLD_SIZE", "")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    return count.isdigit() and int(count) > 1 and all(name in os.environ for name in needed)


def _group(on_cpu: bool = True) -> Any:
    """Return a group that can send CPU tensors: the default group, or an additional one."""
    if not on_cpu or "cpu:gloo" in str(dist.get_backend_config()):
        return None
    key = id(dist.group.WORLD)
    if key not in _side:
        _side[key] = dist.new_group(backend="gloo")
    return _side[key]


def exchange(value: Any) -> list[Any]:
    """Return every process's value, in the order of their numbers."""
    if size() == 1:
        return [value]
    values = [None] * size()
    dist.all_gather_object(values, value, group=_group())
    return values


def wait() -> None:
    """Wait for all processes to get here."""
    exchange(None)


def on_first(function: Callable[[], Any]) -> Any:
    """Call a function in the first process only; return its result, plain data, in all.

    An error is raised in all of them.
    """
    if size() == 1:
        return function()
    value: Any = None
    failure: Exception | None = None
    if is_first():
        try:
            value = function()
        except Exception as error:
            failure = error
    value, described = exchange((value, describe_error(failure)))[0]
    if described is not None:
        raise failure or error_of(described)
    return value


def holds(argument: str, *, is_file: bool = False) -> Callable[[Function], Function]:
    """Hold a function's folder or file while it runs (`_records.holding`); None holds nothing.

    Of several processes the first one holds it, for all of them.

    Args:
        argument: Name of the function's argument that says where it writes.
        is_file: Whether that is a file.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            target = signature.bind(*args, **kwargs).arguments.get(argument)
            with contextlib.ExitStack() as stack:
                if target is not None:
                    lock = _records.holding(target, is_file=is_file)
                    on_first(lambda: stack.enter_context(lock))
                return function(*args, **kwargs)

        return cast(Function, held)

    return decorate


def check_same(what: str, value: Any) -> None:
    """Raise in all processes if their values (plain data) differ."""
    values = exchange(value)
    for number, other in enumerate(values):
        if other != values[0]:
            raise HydraError(
                f"The processes do not agree on {what}: process 0 has {values[0]!r:.60}, process "
                f"{number} has {other!r:.60}. Give all of them the same model, data and settings."
            )


def sum_over(tensors: list[Tensor]) -> None:
    """Sum tensors over all processes, in place; all of one type, on one device."""
    if size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=_group(flat.device.type == "cpu"))
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def broadcast(tensor: Tensor, source: int) -> None:
    """Copy a tensor of one process into those of all others, in place."""
    if size() > 1:
        dist.broadcast(tensor, src=source, group=_group(tensor.device.type == "cpu"))


def describe_error(error: Exception | None) -> dict[str, str] | None:
    """Return an error as plain data: not every error can be rebuilt in another process."""
    return None if error is None else {"kind": type(error).__name__, "text": str(error)}


def error_of(description: Mapping[str, str]) -> Exception:
    """Return the error that another process described."""
    name, text = description["kind"], description["text"]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, (HydraError, ValueError, TypeError)):
        return kind(text)
    return HydraError(f"Another process failed with {name}: {text}")


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
    if size() == 1:
        for index, batch in enumerate(data):
            yield work(index, batch)
        return
    known: dict[str, Any] = {"hash": None, "batches": None}
    share = _share(data, name, known)
    first, own = 0, rank()
    while True:
        done: dict[int, Result] = {}
        failed: int | None = None
        failure: Exception | None = None
        for _ in range(ahead):
            try:
                if (item := next(share, None)) is None:
                    break
                # clone: of a view its whole storage would be sent
                done[item[0]] = {k: v.detach().cpu().clone() for k, v in work(*item).items()}
            except Exception as error:  # sent to the other processes, so that all raise
                failed, failure = own, error
                break
            own += size()
        told = {"name": name, "hash": known["hash"], "failed": failed}
        reports = exchange((told, done, describe_error(failure)))
        names = [report["name"] for report, _, _ in reports]
        if len(set(names)) > 1:
            raise HydraError(
                f"The processes do different things: they read {', '.join(map(repr, names))}. Call "
                "the same functions with the same arguments in all of them."
            )
        if len({report["hash"] for report, _, _ in reports} - {None}) > 1:
            raise _different(name)
        results = {i: result for _, part, _ in reports for i, result in part.items()}
        ends = {report["failed"]: error for report, _, error in reports if error is not None}
        until = min(ends, default=first + ahead * len(reports))
        for place in range(first, until):
            if place not in results:
                break
            yield results[place]
        if ends:
            raise failure if failure is not None and failed == until else error_of(ends[until])
        if len(results) < ahead * len(reports):
            ended = exchange(known["batches"] if next(share, None) is None else -1)
            if len(set(ended)) > 1 or ended[0] == -1:
                raise _different(name)
            return
        first = until


def _different(name: str) -> DataError:
    return DataError(
        f"The processes read different data as {name!r}: give every process the whole data in the "
        "same order (no DistributedSampler, shuffle=False or one seed). It is shared out here."
    )


def own_numbers(count: int) -> range:
    """Return the indices of this process's batches among `count`."""
    return range(rank(), count, size())


def own_batches(data: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield this process's batches of data that was read before, with their places.

    Does not wait for other processes, and checks nothing.
    """
    if isinstance(data, (list, tuple, Batches, Chained)):
        load = data.batch if isinstance(data, (Batches, Chained)) else data.__getitem__
        yield from ((number, load(number)) for number in own_numbers(len(data)))
    else:
        step, first = size(), rank()
        yield from ((i, batch) for i, batch in enumerate(data) if i % step == first)


def _share(data: Iterable[Any], name: str, known: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Return this process's batches with their places.

    Notes in `known` what must be equal in all processes: `hash`, of the first batch or of which
    examples there are, and `batches`, their number; None while unknown.
    """
    if isinstance(data, DataLoader) and (order := _order_of(data, name)) is not None:
        known["batches"] = len(order)
        numbers = own_numbers(len(order))
        mine: DataLoader[Any] = DataLoader(
            data.dataset,
            batch_sampler=[order[number] for number in numbers],
            num_workers=data.num_workers,
            collate_fn=data.collate_fn,
            pin_memory=data.pin_memory,
            worker_init_fn=data.worker_init_fn,
        )
        return zip(numbers, mine, strict=True)
    if isinstance(data, (Batches, Chained)):
        examples = hashlib.sha256()
        for part in data.parts if isinstance(data, Chained) else [data]:
            examples.update(repr((part.batch_size, part.indices)).encode())
            if part.labels is not None:
                examples.update(_tensors.tensor_bytes(part.labels))
        known.update(batches=len(data), hash=examples.hexdigest())
        return own_batches(data)
    if isinstance(data, (list, tuple)):
        known.update(batches=len(data), hash=fingerprint(data[:1]) if data else None)
        return own_batches(data)
    return own_batches(_noting(data, known))


def _noting(data: Iterable[Any], known: dict[str, Any]) -> Iterator[Any]:
    """Read a stream, which cannot skip; note the first batch and the number of batches."""
    count = 0
    for batch in data:
        if not count:
            known["hash"] = fingerprint([batch])
        count += 1
        yield batch
    known["batches"] = count


def _order_of(loader: DataLoader[Any], name: str) -> list[list[int]] | None:
    """Return which examples each batch holds, by the first process; None for mere streams."""
    prepared = type(loader).__module__.startswith("accelerate.")
    if prepared or isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            f"The loader of {name!r} gives each process a share of the data already "
            f"({type(loader).__name__}, {type(loader.sampler).__name__}). Give the plain loader of "
            "the whole data: it is shared out here."
        )
    sampler = loader.batch_sampler
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    if sampler is None:
        return None
    order: list[list[int]] = on_first(lambda: [[int(i) for i in rows] for rows in sampler])
    return order
