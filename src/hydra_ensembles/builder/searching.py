"""The long search: a large pool of masks over a cached trunk, evolved for every family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..costs.budget import Budget
from ..criteria import score_heads
from ..errors import UnsupportedModelError
from ..heads.head_mask import HeadScores
from ..hosts import HostModel
from ..search.candidate_table import PartCandidates
from ..search.ensemble_search import Members, search_members
from ..search.mask_pool import make_pool
from ..search.search_state import SearchState
from ..search.selection import EnsembleObjective
from ..search.ticking import ticker
from ..search.trunk_cache import Prefix
from .data_parts import Task

POOL_BYTES = 2 * 2**30


def search_pool(
    task: Task, *, objective: EnsembleObjective, masks: int, rounds: int, cache_bytes: int
) -> dict[str, Any]:
    """Search members by the ensemble's own figures; return plain data."""
    host, parts, budget, members = task.host, task.parts, task.budget, task.members
    state, progress, seed = task.state, task.progress, task.seed
    layers = budget.branch_layers(members)
    both = {
        f"{part}:{name}": data for part, sets in parts.sets.items() for name, data in sets.items()
    }
    labelled = [name for name in both if name.endswith(":id")]
    prefix = Prefix(host, both, cache_bytes=cache_bytes, labelled=labelled)
    tables = score_tables(host, parts.data["select"], layers, state, progress)
    size = _pool_size(host, prefix, masks)
    pool = make_pool(host, layers, size=size, tables=tables, seed=seed)
    work = prefix.batches * (layers[0] + len(pool) * len(layers))
    task.expect(work / len(host), f"Searching {members} members among {len(pool)} masks")
    with ticker("members", work, enabled=progress) as tick:
        for layer in range(layers[0]):
            prefix.advance(torch.ones(host.head_counts[layer], dtype=torch.bool), tick=tick)
        candidates = PartCandidates(prefix, pool, tick=tick, store=task.store)
        found = search_members(
            candidates,
            budget,
            members=members,
            layers=layers,
            select=candidates.rows("select"),
            hold=candidates.rows("stop"),
            objective=objective,
            rounds=rounds,
            seed=seed,
            state=state,
        )
    return plain(found, len(candidates.masks), layers, budget)


def _pool_size(host: HostModel, prefix: Prefix, masks: int) -> int:
    """Return how many candidates' logits fit in memory, `masks` at most."""
    classes = getattr(getattr(host.model, "config", None), "num_labels", None) or 1000
    examples = sum(prefix.examples.values())
    return int(min(masks, max(64, POOL_BYTES / (8 * examples * classes))))


def score_tables(
    host: HostModel, data: Any, layers: Sequence[int], state: SearchState, progress: bool
) -> dict[str, HeadScores]:
    """Score heads by criteria, as seeds of the pool."""
    if not state.find("tables"):
        few = all(host.head_counts[layer] <= 3 for layer in layers)  # the pool holds all masks
        found = {} if few else _scores(host, data, progress)
        state.add({"tables": {name: table.tolist() for name, table in found.items()}})
    return {name: HeadScores(rows) for name, rows in state.find("tables")[0].items()}


def _scores(host: HostModel, data: Any, progress: bool) -> dict[str, HeadScores]:
    try:
        return score_heads(host, data, criterion=["taylor", "hies"], progress=progress)
    except UnsupportedModelError:  # attention that cannot be watched (Longformer) has no entropy
        return score_heads(host, data, criterion=["taylor", "his"], progress=progress)


def plain(found: Members, pool: int, layers: Sequence[int], budget: Budget) -> dict[str, Any]:
    """Return what a search found as plain data."""
    chosen = found.selection
    best = sorted(chosen.trail, key=lambda t: -t["held_out"])[:10]
    result = {
        "masks": [mask.tolist() for mask in found.masks],
        "cost": found.cost,
        "origins": list(found.origins),
        "branch_layers": list(layers),
        "pool": pool,
        "rounds": found.rounds,
        "gain": chosen.gain,
        "held_out_gain": chosen.held_out,
        "intervals": {name: list(pair) for name, pair in chosen.intervals.items()},
        "tried": best,
    }
    distinct = len(set(found.masks))
    if distinct < len(found.masks):
        bound = "" if budget.max_cost is None else f" within max_cost={budget.max_cost}"
        result["equal_members"] = (
            f"no ensemble of {len(found.masks)} different masks out of {pool} was found{bound}"
        )
    return result
