"""Benchmark models side by side: ratios of latency from one interleaved run, never absolute times.

Every round times every model once, in a shuffled order, so that whatever else the machine does
falls on all of them; a ratio is the median over rounds of the *paired* ratios to the first model,
with a bootstrap interval over rounds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import map_tensors, move, split_batch
from ..data.eval_mode import evaluating
from ..data.model_runs import device_of
from ..data.progress import expect, expects, progress_bar
from ..errors import DataError
from ..hosts.host_data import batch_for
from ..hosts.operation_count import multiply_adds
from .benchmark_result import BenchmarkResult, PeakMemory, Timing

Call = Callable[[], Any]


def benchmark(
    models: Mapping[str, Callable[..., Any]],
    batch: Any,
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    rounds: int = 20,
    warmup: int = 2,
    threads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_seconds: float | None = None,
    min_sample_seconds: float = 0.02,
    seed: int = 0,
    progress: bool = True,
) -> BenchmarkResult:
    """Time models against each other, interleaved, and count what they do.

    Example:
        >>> result = benchmark({"single": model, "hydra": ensemble}, batch)
        >>> result.ratio("hydra", 1)

    Args:
        models: Models by name; ratios are to the first one. Each is called on a batch without
            labels, in eval mode, without gradients.
        batch: A batch of any size; its samples are repeated to make up every batch size.
        batch_sizes: Batch sizes to run.
        rounds: How often every model is timed at each batch size.
        warmup: Untimed calls of every model before the first round.
        threads: Threads of the CPU kernels while it runs; unchanged when None.
        dtype: Run copies of the models, and floating-point inputs, in this type.
        device: Run copies of the models on this device.
        max_seconds: Stop a batch size after the round that passes this many seconds (at least
            three rounds are run).
        min_sample_seconds: Quicker models are called several times for one timing.
        seed: Of the order in each round.
        progress: Show a bar on a terminal.

    Returns:
        Timings, paired ratios, counted multiply-adds and peak memory; prints as a table and saves
        as JSON. Multiply-adds are counted by `torch.utils.flop_counter` in one real call on the
        smallest batch. Memory is the allocator's on a GPU; on a CPU it is measured at the
        operators (see `PeakMemory`), parameters included.
    """
    if not isinstance(models, Mapping) or not models:
        raise DataError(
            'Expected models by name, such as {"single": model, "hydra": ensemble}; found '
            f"{type(models).__name__ if models else 'none'}."
        )
    sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
    batch_sizes = sizes
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise DataError(
            f"batch_sizes={tuple(batch_sizes)} and rounds={rounds}: expected positive numbers."
        )
    batch = batch_for(next(iter(models.values())), batch)
    if dtype is not None or device is not None:
        models = {
            name: copy.deepcopy(model).to(dtype=dtype, device=device)
            if isinstance(model, nn.Module)
            else model
            for name, model in models.items()
        }
    devices = [device_of(model) for model in models.values()]
    on_gpu = any(place is not None and place.type == "cuda" for place in devices)
    timings: list[Timing] = []
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if threads is not None:
            torch.set_num_threads(threads)
        for model in models.values():
            stack.enter_context(evaluating(model))
        counted = {
            n: multiply_adds(_call(m, batch, min(batch_sizes), dtype)) for n, m in models.items()
        }
        if expects(progress):
            smallest = min(batch_sizes)
            once = [
                _time(_call(m, batch, smallest, dtype), 1, lambda: None) for m in models.values()
            ]
            seconds_of = [
                warmup * seconds + rounds * max(seconds, min_sample_seconds)
                for size in batch_sizes
                for seconds in (one * size / smallest for one in once)
            ]
            limit = math.inf if max_seconds is None else max_seconds * len(batch_sizes)
            expect("timing", min(sum(seconds_of), limit))
        for size in batch_sizes:
            calls = {name: _call(model, batch, size, dtype) for name, model in models.items()}
            for call in calls.values():
                for _ in range(warmup):
                    call()
            memory = {
                name: (_weight_bytes(models[name]), _peak_bytes(device_of(models[name]), call))
                for name, call in calls.items()
            }
            seconds = _interleaved(
                calls,
                synchronize=torch.cuda.synchronize if on_gpu else lambda: None,
                rounds=rounds,
                max_seconds=max_seconds,
                min_sample=min_sample_seconds,
                seed=seed,
                description=f"batch {size}" if progress else None,
            )
            timings += [
                Timing(
                    name,
                    size,
                    tuple(seconds[name]),
                    counted[name] * size // min(batch_sizes),
                    memory[name][0],
                    memory[name][1],
                )
                for name in models
            ]
        used = torch.get_num_threads()
    first = next(iter(models.values()))
    parameters = first.parameters() if isinstance(first, nn.Module) else ()
    own = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    on_cpu = devices[0] is None or devices[0].type != "cuda"
    memory_of = (
        "the peak of tensors alive in one call, measured at the operators"
        if on_cpu
        else "the allocator's peak above them in one call"
    )
    kind = "cpu" if devices[0] is None else devices[0].type
    return BenchmarkResult(
        tuple(timings),
        {
            "device": kind if on_cpu else torch.cuda.get_device_name(devices[0]),
            "dtype": str(dtype or own).removeprefix("torch."),
            "threads": used,
            "torch": torch.__version__.split("+")[0],
            "memory": f"weights, and {memory_of}",
            "seed": seed,
        },
    )


def _interleaved(
    calls: Mapping[str, Call],
    *,
    synchronize: Call,
    rounds: int,
    max_seconds: float | None,
    min_sample: float,
    seed: int,
    description: str | None,
) -> dict[str, list[float]]:
    """Return the seconds per call, by model and round."""
    repeats = {}
    for name, call in calls.items():
        once = _time(call, 1, synchronize)
        repeats[name] = max(1, round(min_sample / max(once, 1e-9)))
    names = list(calls)
    generator = torch.Generator().manual_seed(seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    bar = progress_bar(
        range(rounds), description=description or "", enabled=description is not None
    )
    for done in bar:
        for index in torch.randperm(len(names), generator=generator).tolist():
            name = names[index]
            seconds[name].append(_time(calls[name], repeats[name], synchronize))
        late = max_seconds is not None and time.perf_counter() - start > max_seconds
        if late and done >= 2:
            break
    return seconds


def _time(call: Call, repeats: int, synchronize: Call) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


def _peak_bytes(device: torch.device | None, call: Call) -> int:
    """Return the peak that one call adds to the weights."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with PeakMemory() as memory:
        call()
    return memory.peak


def _weight_bytes(model: Any) -> int:
    if hasattr(model, "parameter_bytes"):  # an ensemble also keeps packed copies
        return model.parameter_bytes()["memory"]
    if not isinstance(model, nn.Module):
        return 0
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def _call(model: Callable[..., Any], batch: Any, size: int, dtype: torch.dtype | None) -> Call:
    args, kwargs, _ = split_batch(batch)
    where = device_of(model)

    def resize(tensor: Tensor) -> Tensor:
        tensor = tensor[torch.arange(size, device=tensor.device) % len(tensor)]
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    args, kwargs = (move(map_tensors(resize, part), where) for part in (args, kwargs))
    return lambda: model(*args, **kwargs)
