"""Many candidate masks on one batch, from a layer to the logits: streams part only where masks do.

What a candidate's logits are, to the bit, depends on the batch and on which candidates run beside
it. So the unit of work that processes and Ray share is one batch with all its candidates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data import processes
from ..data.memory import free_memory, is_out_of_memory
from ..errors import DataError
from .candidate_streams import Branch, Call, Engine, Replacement

Tick = Callable[[int], None]
Gates = Sequence[Tensor]
"""Gates of the layers from the current one on, `[heads]` each."""


def climb(
    engine: Engine,
    layer: int,
    x: Tensor,
    call: Call,
    above: Sequence[Gates],
    edit: Replacement | None = None,
    tick: Tick | None = None,
) -> Tensor:
    """Return the logits of all candidates on one batch, `[batch, candidate, class]`.

    Half as many candidates run at once whenever memory runs out.

    Args:
        engine: Runs the host's blocks.
        layer: The layer that the states enter.
        x: Hidden states of the batch.
        call: What the host hands to its blocks for it.
        above: The candidates' gates from this layer on.
        edit: What replaces heads of this layer that are off (default: zero).
        tick: Called with the number of block runs that were done.
    """
    while True:
        try:
            return _tree(engine, layer, x, call, above, edit, tick)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if engine.streams < 2:
                raise DataError(
                    f"Memory ran out on a batch of {call.batch} examples ({error}). Give the "
                    "search smaller batches, or less cache_bytes."
                ) from error
        engine.streams //= 2
        free_memory()
        warnings.warn(
            f"Memory ran out: going on with {engine.streams} candidates at once.", stacklevel=3
        )


def _tree(
    engine: Engine,
    start: int,
    x: Tensor,
    call: Call,
    above: Sequence[Gates],
    edit: Replacement | None,
    tick: Tick | None,
) -> Tensor:
    """Run all candidates, depth first."""
    result: list[Tensor | None] = [None] * len(above)
    host = engine.host

    def rise(layer: int, x: Tensor, groups: list[list[int]]) -> None:
        if layer == len(host):
            logits = engine.read(x, call)
            for stream, group in enumerate(groups):
                for mask in group:
                    result[mask] = logits[:, stream]
            return
        branches: list[Branch] = []
        members: list[list[int]] = []
        for stream, group in enumerate(groups):
            places: dict[tuple[float, ...], int] = {}
            for mask in group:
                row = above[mask][layer - start]
                key = tuple(row.tolist())
                if key not in places:
                    places[key] = len(branches)
                    branches.append((stream, row))
                    members.append([])
                members[places[key]].append(mask)
        width = engine.streams
        last = layer == len(host) - 1 and engine.own
        width = width * 64 if last and host.readout.tokens is not None else width
        for begin in range(0, len(branches), width):
            chunk = branches[begin : begin + width]
            first, end = chunk[0][0], chunk[-1][0] + 1  # branches stand in the order of streams
            part = x[first * call.batch : end * call.batch]
            local = [(parent - first, row) for parent, row in chunk]
            y = engine.step(layer, part, call, local, edit if layer == start else None)
            if tick is not None:  # the other processes do as much at the same time
                tick(len(chunk) * processes.size())
            rise(layer + 1, y, members[begin : begin + width])

    rise(start, x, [list(range(len(above)))])
    return torch.stack(result, 1)  # type: ignore[arg-type]
