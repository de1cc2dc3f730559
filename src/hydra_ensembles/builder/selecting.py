"""Selection in a minute: few stems over a cached trunk, most masks dropped on little data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.splits import split
from ..search.candidate_table import PartCandidates
from ..search.ensemble_search import search_members
from ..search.halving import halve
from ..search.mask_pool import make_pool
from ..search.selection import EnsembleObjective
from ..search.ticking import ticker
from ..search.trunk_cache import Prefix
from .data_parts import Task
from .searching import plain, score_tables

RUNGS = {"first": 0.1, "second": 0.3, "rest": 0.6}
"""Shares of the selecting data: all masks meet the first, survivors the second and the rest."""

FEWEST = 40
"""Selecting examples below which all masks meet all data."""


def select_members(
    task: Task, *, objective: EnsembleObjective, masks: int, stems: int, cache_bytes: int
) -> dict[str, Any]:
    """Select members by the ensemble's own figures; return plain data."""
    host, parts, budget, members = task.host, task.parts, task.budget, task.members
    state, progress, seed = task.state, task.progress, task.seed
    layers = budget.branch_layers(members)
    known = parts.data["select"]
    rungs = split(known, RUNGS, seed=seed) if known.count >= FEWEST else {"rest": known}
    sets = {f"{rung}:id": data for rung, data in rungs.items()}
    sets |= {f"rest:{name}": data for name, data in parts.sets["select"].items() if name != "id"}
    sets |= {f"stop:{name}": data for name, data in parts.sets["stop"].items()}
    labelled = [name for name in sets if name.endswith(":id")]
    prefix = Prefix(host, sets, cache_bytes=cache_bytes, labelled=labelled)
    tables = score_tables(host, next(iter(rungs.values())), layers, state, progress)
    pool = make_pool(host, layers, size=masks, tables=tables, stems=stems, seed=seed)
    work = prefix.batches * (layers[0] + (stems + len(pool) // 4) * len(layers))
    task.expect(work / len(host), f"Selecting {members} members among {len(pool)} masks")
    with ticker("members", work, enabled=progress) as tick:
        for layer in range(layers[0]):
            prefix.advance(torch.ones(host.head_counts[layer], dtype=torch.bool), tick=tick)
        left = halve(
            prefix,
            pool,
            [rung for rung in rungs if rung != "rest"],
            objective=objective,
            members=members,
            state=state,
            tick=tick,
        )
        candidates = PartCandidates(prefix, left, tick=tick, store=task.store)
        found = search_members(
            candidates,
            budget,
            members=members,
            layers=layers,
            select=_rows(candidates, list(rungs)),
            hold=candidates.rows("stop"),
            objective=objective,
            rounds=0,
            seed=seed,
            state=state,
        )
    return plain(found, len(pool), layers, budget)


def _rows(candidates: PartCandidates, parts: list[str]) -> dict[str, Tensor]:
    """Return the examples of several parts, by data set."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, rows in candidates.rows(part).items():
            found.setdefault(name, []).append(rows)
    return {name: torch.cat(rows) for name, rows in found.items()}
