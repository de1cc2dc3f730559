"""Successive halving of candidate masks: most are dropped on a small share of the data.

Each rung scores the remaining masks on a little more data and keeps the best (Jamieson & Talwalkar,
2016, https://arxiv.org/abs/1502.07943). A mask is worth as much as the best ensemble it was in: on
its own, or added to the best masks of the rung, so that masks which complement others survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..heads.head_mask import HeadMask
from .candidate_runs import Tick
from .candidate_table import joined
from .search_state import SearchState
from .selection import EnsembleObjective, Selector
from .task_table import table_of
from .trunk_cache import Outputs, Prefix


def halve(
    prefix: Prefix,
    pool: Mapping[HeadMask, str],
    rungs: Sequence[str],
    *,
    objective: EnsembleObjective,
    members: int,
    keep: float = 1 / 3,
    at_least: int = 12,
    state: SearchState,
    tick: Tick | None = None,
) -> dict[HeadMask, str]:
    """Return the masks that survive all rungs; the first, the unpruned host, always does.

    Args:
        prefix: Cached states at the first layer in which masks differ, by `<rung>:<name>`.
        pool: Masks and their origins; the first is the unpruned host.
        rungs: Names of the shares of the data, in order.
        objective: The objective of an ensemble.
        members: Largest size of the ensembles in which masks are scored.
        keep: Share of the masks that survives a rung.
        at_least: Fewest masks that survive a rung.
        state: Stores finished rungs, so that a stopped search can resume.
        tick: Called with the number of finished block runs.
    """
    masks = list(pool)
    known = state.find("rung")
    before: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    for number in range(len(rungs)):
        if number < len(known):
            masks, before = [list(pool)[i] for i in known[number]], {}
            continue
        sets = [name for name in prefix.data if name.partition(":")[0] in rungs[: number + 1]]
        new = prefix.logits(masks, sets=[n for n in sets if n not in before], tick=tick)
        before |= new.logits
        labels |= {name: new.labels[name] for name in sets if name in new.labels}
        table = table_of(Outputs(joined(before), joined(labels), prefix.host.task))
        worth = _worth(Selector(table, objective=objective), members)
        count = max(at_least, round(keep * len(masks)))
        order = torch.tensor(worth).sort(descending=True, stable=True).indices.tolist()
        left = sorted({0, *order[:count]})
        masks = [masks[i] for i in left]
        before = {name: logits[:, left] for name, logits in before.items()}
        places = {mask: i for i, mask in enumerate(pool)}
        state.add({"rung": [places[mask] for mask in masks]})
    return {mask: pool[mask] for mask in masks}


def _worth(selector: Selector, members: int) -> list[float]:
    """Return, per candidate, the objective of the best ensemble that it was in."""
    pool = list(range(selector.candidates))
    best: tuple[int, ...] = ()
    worth = [float("-inf")] * len(pool)
    for _ in range(members):
        gains = selector.gains(best, pool)
        worth = [max(pair) for pair in zip(worth, gains, strict=True)]
        free = [i for i in pool if i not in best] or pool
        best = (*best, max(free, key=lambda i: (gains[i], -i)))
    return worth
