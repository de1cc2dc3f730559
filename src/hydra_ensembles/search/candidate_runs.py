"""Many candidate masks on one batch, from a layer to the logits: streams part only where masks do.

A candidate's logits, to the bit, depend on the batch and on which candidates run with it. So the
unit of work that several processes share is one batch with all its candidates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..answer_each import free_memory, is_out_of_memory
from ..data import processes
from ..errors import DataError
from .candidate_streams import Branch, Call, Engine, Replacement

Tick = Callable[[int], None]
Gates = Sequence[Tensor]
"""Gates of the layers from the current one on, `[heads]` each."""


def candidate_logits(
    engine: Engine,
    start: int,
    states: Tensor,
    call: Call,
    candidates: Sequence[Gates],
    edit: Replacement | None = None,
    tick: Tick | None = None,
) -> Tensor:
    """Return the logits of all candidates on one batch, `[batch, candidate, class]`.

    Whenever memory runs out, half as many candidates run at once.

    Args:
        engine: Runs the host's blocks.
        start: The layer that the states enter.
        states: Hidden states of the batch.
        call: What the host passes to its blocks for this batch.
        candidates: The candidates' gates from this layer on.
        edit: What replaces heads of this layer that are off (default: zero).
        tick: Called with the number of finished block runs.
    """
    while True:
        try:
            return _run_tree(engine, start, states, call, candidates, edit, tick)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if engine.streams < 2:
                raise DataError(
                    f"Memory ran out on a batch of {call.batch} examples ({error}). Give the "
                    "search smaller batches, or lower cache_bytes."
                ) from error
        engine.streams //= 2
        free_memory()
        warnings.warn(
            f"Memory ran out: continuing with {engine.streams} candidates at once.", stacklevel=3
        )


def _run_tree(
    engine: Engine,
    start: int,
    states: Tensor,
    call: Call,
    candidates: Sequence[Gates],
    edit: Replacement | None,
    tick: Tick | None,
) -> Tensor:
    """Run all candidates, depth first: those with equal gates so far are one stream."""
    host = engine.host
    results: dict[int, Tensor] = {}

    def run_from(layer: int, x: Tensor, streams: list[list[int]]) -> None:
        if layer == len(host):
            logits = engine.read(x, call)
            for stream, group in enumerate(streams):
                results.update(dict.fromkeys(group, logits[:, stream]))
            return
        branches: dict[tuple[int, tuple[float, ...]], tuple[Branch, list[int]]] = {}
        for stream, group in enumerate(streams):
            for candidate in group:
                row = candidates[candidate][layer - start]
                branch = branches.setdefault((stream, tuple(row.tolist())), ((stream, row), []))
                branch[1].append(candidate)
        width = engine.streams
        if layer == len(host) - 1 and engine.own and host.readout.tokens is not None:
            width *= 64  # only the tokens that the classifier reads
        ordered = list(branches.values())  # in the order of their streams
        for begin in range(0, len(ordered), width):
            chunk = ordered[begin : begin + width]
            first, end = chunk[0][0][0], chunk[-1][0][0] + 1
            part = x[first * call.batch : end * call.batch]
            local = [(stream - first, row) for (stream, row), _ in chunk]
            y = engine.step(layer, part, call, local, edit if layer == start else None)
            if tick is not None:  # the other processes do as much at the same time
                tick(len(chunk) * processes.size())
            run_from(layer + 1, y, [group for _, group in chunk])

    run_from(start, states, [list(range(len(candidates)))])
    return torch.stack([results[candidate] for candidate in range(len(candidates))], 1)
