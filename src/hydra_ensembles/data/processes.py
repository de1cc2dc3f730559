"""Several processes that work as one: ranks, messages, and one result for all.

Under `torchrun` or `accelerate launch` every process runs the same program. The functions that run
a model over data (`evaluate`, `score_heads`, `build`, `distill`, ...) are called by all of them,
with the same arguments, and return the same result in each. The first process writes the files.

Messages are JSON and safetensors: nothing is pickled.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from .. import _records, errors
from ..errors import HydraError

Function = TypeVar("Function", bound=Callable[..., Any])
_alone: ContextVar[bool] = ContextVar("alone", default=False)
_side: dict[int, Any] = {}
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


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
    if _alone.get() or not dist.is_available() or torch.utils.data.get_worker_info() is not None:
        return False
    if not dist.is_initialized() and _launched():
        _join()
    return dist.is_initialized()


def _launched() -> bool:
    """Return whether a launcher has started several processes."""
    count = os.environ.get("WORLD_SIZE", "")
    return count.isdigit() and int(count) > 1 and all(name in os.environ for name in _NEEDED)


def _join() -> None:
    """Join the process group that the launcher's environment describes."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _messenger() -> Any:
    """Return a group that can send CPU tensors: the default group, or an additional one."""
    if "cpu:gloo" in str(dist.get_backend_config()):
        return None
    key = id(dist.group.WORLD)
    if key not in _side:
        _side[key] = dist.new_group(backend="gloo")
    return _side[key]


def _group_for(tensor: Tensor) -> Any:
    return _messenger() if tensor.device.type == "cpu" else None


def exchange(message: bytes) -> list[bytes]:
    """Return every process's message, in the order of their numbers."""
    if size() == 1:
        return [message]
    group = _messenger()
    length = torch.tensor([len(message)])
    lengths = [torch.zeros_like(length) for _ in range(size())]
    dist.all_gather(lengths, length, group=group)
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(1, *counts), dtype=torch.uint8)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded, group=group)
    return [row[:count].numpy().tobytes() for row, count in zip(rows, counts, strict=True)]


def wait() -> None:
    """Wait for all processes to get here."""
    exchange(b"")


def exchange_plain(value: Any) -> list[Any]:
    """Return every process's value; values must be JSON-serialisable."""
    return [json.loads(text) for text in exchange(json.dumps(value).encode())]


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
    report = exchange_plain({"value": value, "error": describe_error(failure)})[0]
    if report["error"] is not None:
        raise failure or error_of(report["error"])
    return report["value"]


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
    if size() == 1:
        return
    values = exchange_plain(value)
    for number, other in enumerate(values):
        if other != values[0]:
            raise HydraError(
                f"The processes do not agree on {what}: process 0 has {_short(values[0])}, process "
                f"{number} has {_short(other)}. Give all of them the same model, data and settings."
            )


def sum_over(tensors: list[Tensor]) -> None:
    """Sum tensors over all processes, in place; all of one type, on one device."""
    if size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=_group_for(flat))
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def broadcast(tensor: Tensor, source: int) -> None:
    """Copy a tensor of one process into those of all others, in place."""
    if size() > 1:
        dist.broadcast(
            tensor, src=source, group=_messenger() if tensor.device.type == "cpu" else None
        )


def pack(tensors: Mapping[str, Tensor], plain: Any = None) -> bytes:
    """Return tensors by name, and plain data, as bytes."""
    from safetensors.torch import save

    # clone: safetensors refuses tensors that share memory
    owned = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return save(owned, metadata={"plain": json.dumps(plain)})


def unpack(message: bytes) -> tuple[dict[str, Tensor], Any]:
    """Return what `pack` was given."""
    from safetensors.torch import load

    header = json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
    return load(message), json.loads(header["__metadata__"]["plain"])


def describe_error(error: Exception | None) -> dict[str, str] | None:
    """Return an error as plain data."""
    return None if error is None else {"kind": type(error).__name__, "text": str(error)}


def error_of(description: Mapping[str, str]) -> Exception:
    """Return the error that another process described."""
    kind = getattr(errors, description["kind"], None) or getattr(
        builtins, description["kind"], None
    )
    if isinstance(kind, type) and issubclass(kind, (HydraError, ValueError, TypeError)):
        return kind(description["text"])
    return HydraError(f"Another process failed with {description['kind']}: {description['text']}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
