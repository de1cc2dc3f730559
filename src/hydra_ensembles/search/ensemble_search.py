"""Search for members: select from a pool by the ensemble's metrics, mutate, and stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..costs.budget import Budget
from ..errors import MaskError
from ..heads.head_mask import HeadMask
from .candidate_table import Candidates as Candidates
from .candidate_table import Table
from .mask_pool import mutations
from .search_state import SearchState
from .selection import EnsembleObjective, Rows, Selection, Selector


@dataclass(frozen=True)
class Members:
    """The members that a search chose.

    Attributes:
        masks: One mask per member.
        selection: Their metrics, and what else was tried.
        origins: Origin of each member's mask.
        cost: Counted multiply-adds relative to the plain host.
        rounds: Rounds of evolution that helped on the held-out part.
    """

    masks: tuple[HeadMask, ...]
    selection: Selection
    origins: tuple[str, ...]
    cost: float
    rounds: int


def search_members(
    candidates: Candidates,
    budget: Budget,
    *,
    members: int = 3,
    layers: Sequence[int],
    select: Rows | None = None,
    hold: Rows | None = None,
    objective: EnsembleObjective | None = None,
    rounds: int = 2,
    beam: int = 3,
    bags: int = 4,
    leave_family_out: bool = True,
    seed: int = 0,
    state: SearchState | None = None,
) -> Members:
    """Choose members from a pool and its mutations.

    Selection runs on the whole selection part and on bags of it: half of the examples each, and one
    family of outliers left out at a time. The results are finalists; held-out examples of all
    families decide between them, and a round of mutations counts only if it helps there.

    Args:
        candidates: The pool; grown by mutations.
        budget: Bounds the members' counted cost.
        members: Number of members M; a mask is chosen twice only if no other fits the budget.
        layers: Layers in which mutations change heads.
        select, hold: Examples by data set for selection and for the decision; all by default.
        objective: See `EnsembleObjective`.
        rounds: Most rounds of mutations; none if the pool holds all masks.
        beam: Ensembles kept while growing.
        bags: Number of bags with half of the examples.
        leave_family_out: Whether to also select with each family left out.
        seed: Seed of bags and mutations.
        state: Stores finished rounds, so that a stopped search can resume; its settings must name
            everything that the rounds depend on.
    """
    objective = objective or EnsembleObjective()
    state = SearchState(None, {}) if state is None else state
    known = state.find("round")
    exhaustive = "all" in candidates.origins.values()
    best: Selection | None = None
    helped = 0
    finalists: dict[tuple[int, ...], None] = {}
    for turn in range(1 + (0 if exhaustive else rounds)):
        if turn:
            assert best is not None
            chosen = {candidates.masks[i] for f in finalists for i in f}
            more = mutations(
                sorted(chosen, key=lambda m: m.tolist()),
                layers,
                count=max(16, len(candidates.masks) // 4),
                known=candidates.origins,
                seed=seed + turn,
            )
            candidates.add(dict.fromkeys(more, "mutation"))
        if turn == len(known):
            table = Table(candidates.outputs)
            fits = _Fits(candidates.masks, budget)
            for bag in _bags(table, select, bags, leave_family_out, seed):
                selector = Selector(table, objective=objective, select=bag, hold=hold, fits=fits)
                for ensemble in selector.forward(members, beam=beam):
                    finalists[ensemble] = None
            if not finalists:
                raise MaskError(
                    f"None of {len(candidates.masks)} candidates gives {members} members within "
                    f"max_cost={budget.max_cost}. Allow more, or take fewer members."
                )
            judge = Selector(table, objective=objective, select=select, hold=hold, fits=fits)
            known.append({"finalists": list(finalists), **asdict(judge.choose(list(finalists)))})
            state.add({"round": known[turn]})
        finalists = dict.fromkeys(tuple(finalist) for finalist in known[turn]["finalists"])
        now = Selection.of(known[turn])
        if best is not None and now.order <= (best.order[0], best.held_out + 1e-9):
            break
        helped, best = turn, now
    assert best is not None
    masks = tuple(candidates.masks[i] for i in best.members)
    origins = tuple(candidates.origins[mask] for mask in masks)
    return Members(masks, best, origins, budget.ratio(masks), helped)


class _Fits:
    """Whether a set of candidates fits the budget; cached per set."""

    def __init__(self, masks: Sequence[HeadMask], budget: Budget) -> None:
        self.masks, self.budget = masks, budget
        self.known: dict[frozenset[int], bool] = {}

    def __call__(self, members: Sequence[int]) -> bool:
        key = frozenset(members)  # a mask chosen twice runs once
        if key not in self.known:
            self.known[key] = self.budget.allows([self.masks[i] for i in sorted(key)])
        return self.known[key]


def _bags(
    table: Table, select: Rows | None, bags: int, leave_family_out: bool, seed: int
) -> list[dict[str, Tensor]]:
    """Return the sets of rows to select on: all, each family left out, halves."""
    base = {
        name: torch.arange(size) if select is None else select[name]
        for name, size in table.sizes().items()
    }
    row_sets = [dict(base)]
    families = table.families
    if leave_family_out and len(families) > 2:
        for family in families:
            row_sets.append({name: rows for name, rows in base.items() if name != family})
    generator = torch.Generator().manual_seed(seed)
    for _ in range(bags):
        row_sets.append(
            {
                name: rows[torch.randperm(len(rows), generator=generator)[: (len(rows) + 1) // 2]]
                for name, rows in base.items()
            }
        )
    return row_sets
