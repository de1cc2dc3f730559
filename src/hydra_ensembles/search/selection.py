"""Members that complement each other: an ensemble selected by its own validation figures.

Forward selection with a beam (Caruana et al., 2004, https://doi.org/10.1145/1015330.1015432) over a
table of candidates; members differ as long as the budget allows it. The objective is the gain over
the host per family of outliers, mean plus worst, joined with NLL. One part of the examples selects,
another part decides between the finalists.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..costs.budget import Budget
from ..errors import MaskError
from ..evaluation.intervals import percentiles
from ..heads.head_mask import HeadMask, HeadScores
from .candidate_table import Figures, Table


def count_masks(heads: Sequence[int], kept: Sequence[int], layers: Sequence[int]) -> int:
    """Count the masks that keep the given numbers of heads in these layers."""
    return math.prod(math.comb(heads[layer], kept[layer]) for layer in layers)


def next_best(
    scores: HeadScores, mask: HeadMask, layers: Sequence[int], taken: Collection[HeadMask]
) -> HeadMask | None:
    """Return the best-scoring mask that is not taken, or None if all are.

    Masks with the same number of heads per layer are tried in order of the score they lose against
    `mask` (sum of the kept heads' scores). One step swaps a kept head of a layer for another. Ties:
    the mask that was reached first, lower layers and heads first.

    Args:
        scores: Scores of all heads; higher = keep. `mask` keeps the highest of each layer.
        mask: The mask to start from.
        layers: Layers in which heads may be swapped.
        taken: Masks to exclude.
    """
    queue: list[tuple[float, int, HeadMask]] = [(0.0, 0, mask)]
    seen = {mask}
    while queue:
        loss, _, best = heapq.heappop(queue)
        if best not in taken:
            return best
        for layer in layers:
            row = best[layer]
            for out in row.nonzero().flatten().tolist():
                for into in (~row).nonzero().flatten().tolist():
                    changed = row.clone()
                    changed[out], changed[into] = False, True
                    neighbour = best.with_layer(layer, changed)
                    if neighbour not in seen:
                        seen.add(neighbour)
                        given_up = float(scores[layer][out] - scores[layer][into])
                        heapq.heappush(queue, (loss + given_up, len(seen), neighbour))
    return None


SHORTLIST, BAGS = 120, 4
"""Candidates that can be a second member, and bags of half of the examples."""

Rows = Mapping[str, Tensor]
Fits = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class EnsembleObjective:
    """The objective of selection: gains over the host in percent; **higher is better**.

    The gain on family f is the share of the host's missing AUROC that is closed,
    g_f = 100 (A_f - H_f) / (1 - H_f), averaged over `scores`: families that the host finds easy
    count as much as hard ones, so that none is traded for another.

    value = mean * mean_f g_f + worst * min_f g_f - nll * (rise of NLL in %) + nll_gain * (its fall)
    - accuracy * (points lost), NLL both raw and at the best temperature of each.

    Attributes:
        scores: Uncertainty scores that rank; several keep a search from serving only one.
        mean, worst: Weights of the mean and of the worst family (and score).
        nll, nll_gain: Loss for each percent that NLL rises, and gain for each that it falls.
        accuracy: Loss for each point of accuracy below the host's.
    """

    scores: tuple[str, ...] = ("msp", "energy")
    mean: float = 1.0
    worst: float = 1.0
    nll: float = 5.0
    nll_gain: float = 1.0
    accuracy: float = 2.0

    def gains(self, figures: Figures, host: Figures) -> dict[str, float]:
        """Return the gain of each family in AUROC points, mean over scores."""
        return {
            family: 100 * sum(by[s] - host.auroc[family][s] for s in self.scores) / len(self.scores)
            for family, by in figures.auroc.items()
        }

    def closed(self, figures: Figures, host: Figures) -> dict[str, float]:
        """Return the share of missing AUROC that is closed in percent, by family and score."""
        return {
            f"{family} {s}": 100
            * (by[s] - host.auroc[family][s])
            / max(1 - host.auroc[family][s], 0.01)
            for family, by in figures.auroc.items()
            for s in self.scores
        }

    def value(self, figures: Figures, host: Figures) -> float:
        """Return the gain over the host."""
        closed = list(self.closed(figures, host).values())
        total = self.mean * sum(closed) / len(closed) + self.worst * min(closed) if closed else 0.0
        for mine, theirs in ((figures.nll, host.nll), (figures.nll_scaled, host.nll_scaled)):
            rise = 100 * (mine - theirs) / max(theirs, 1e-9)
            total -= self.nll * max(0.0, rise) - self.nll_gain * max(0.0, -rise)
        return total - self.accuracy * max(0.0, 100 * (host.accuracy - figures.accuracy))


@dataclass(frozen=True)
class Selection:
    """The chosen ensemble.

    Attributes:
        members: Candidates, by index.
        gain: Its objective on the selecting part; `held_out`: on the part that decides.
        trail: What was tried, step by step (plain data).
        intervals: 95 % bootstrap intervals of the held-out gains by family and of NLL.
    """

    members: tuple[int, ...]
    gain: float
    held_out: float
    trail: list[dict[str, Any]] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)


class Selector:
    """Selects ensembles out of a table.

    Args:
        table: The candidates; candidate 0 is the unpruned host.
        objective: What to select for.
        select, hold: Examples that select, and examples that decide between finalists.
        fits: Whether members are within the budget.
    """

    def __init__(
        self,
        table: Table,
        *,
        objective: EnsembleObjective | None = None,
        select: Rows | None = None,
        hold: Rows | None = None,
        fits: Fits | None = None,
    ) -> None:
        self.objective = objective or EnsembleObjective()
        self.parts = {
            False: table if select is None else table.take(select),
            True: table if hold is None else table.take(hold),
        }
        self.candidates = table.candidates
        self.fits = fits or (lambda members: True)
        self._known: dict[tuple[bool, tuple[int, ...]], float] = {}
        self._hosts = {part: self._figures((0,), part) for part in (False, True)}

    def _figures(self, members: Sequence[int], held_out: bool) -> Figures:
        return self.parts[held_out].figures(members, scores=self.objective.scores)

    def gain(self, members: Sequence[int], *, held_out: bool = False) -> float:
        """Return the objective of an ensemble (cached)."""
        key = (held_out, tuple(sorted(members)))
        if key not in self._known:
            figures = self._figures(key[1], held_out)
            self._known[key] = self.objective.value(figures, self._hosts[held_out])
        return self._known[key]

    def gains(self, have: tuple[int, ...], pool: Sequence[int]) -> list[float]:
        """Return the objective of `have` plus each candidate of a pool."""
        self._judge(have, pool)
        return [self.gain((*have, new)) for new in pool]

    def forward(self, members: int, *, beam: int = 3) -> list[tuple[int, ...]]:
        """Add members one by one, each the best addition; return the best ensembles, best first.

        After the first member only the `SHORTLIST` best candidates are considered. A candidate is
        chosen again only where no other fits the budget.
        """
        pool: Sequence[int] = range(self.candidates)
        front: list[tuple[int, ...]] = [()]
        for size in range(members):
            grown = {tuple(sorted((*have, new))) for have in front for new in pool}
            for have in front:
                self._judge(have, list(pool))
            ranked = sorted(sorted(grown), key=lambda e: (-len(set(e)), -self.gain(e)))
            # lazily: few need counting
            first = next((e for e in ranked if self.fits(e)), ())
            able = (e for e in ranked if len(set(e)) == len(set(first)) and self.fits(e))
            front = list(islice(able, beam))
            if size == 0:
                others = islice(able, max(0, SHORTLIST - beam))
                pool = [ensemble[0] for ensemble in (*front, *others)]
        return front

    def _judge(self, have: tuple[int, ...], pool: Sequence[int]) -> None:
        """Compute the gains of `have` plus each candidate at once, where scores allow it."""
        o = self.objective
        if not set(o.scores) <= {"msp", "energy"}:
            return
        keys = {new: (False, tuple(sorted((*have, new)))) for new in pool}
        unknown = [new for new, key in keys.items() if key not in self._known]
        grown = self.parts[False].grown(have, unknown, scores=o.scores)
        for new, figures in zip(unknown, grown, strict=True):
            self._known[keys[new]] = o.value(figures, self._hosts[False])

    def choose(self, finalists: Sequence[Sequence[int]]) -> Selection:
        """Choose by the held-out part among the ensembles with the most distinct members."""
        unique = sorted({tuple(sorted(f)) for f in finalists})
        trail = [
            {"members": list(f), "gain": self.gain(f), "held_out": self.gain(f, held_out=True)}
            for f in unique
        ]
        best = max(
            unique, key=lambda f: (len(set(f)), self.gain(f, held_out=True), [-i for i in f])
        )
        return Selection(
            best, self.gain(best), self.gain(best, held_out=True), trail, self.intervals(best)
        )

    def intervals(
        self, members: Sequence[int], *, draws: int = 100, seed: int = 0
    ) -> dict[str, tuple[float, float]]:
        """Return 95 % bootstrap intervals of the gains, over examples of the held-out part."""
        generator = torch.Generator().manual_seed(seed)
        order = sorted({0, *members})
        part, scores = self.parts[True].only(order), self.objective.scores
        index = [order.index(m) for m in members]
        found: dict[str, list[float]] = {}
        for _ in range(draws):
            rows = {
                name: torch.randint(size, (size,), generator=generator)
                for name, size in part.sizes().items()
            }
            resampled = part.take(rows)
            mine = resampled.figures(index, scores=scores)
            host = resampled.figures((0,), scores=scores)
            for family, value in self.objective.gains(mine, host).items():
                found.setdefault(f"AUROC {family}", []).append(value)
            found.setdefault("NLL", []).append(mine.nll - host.nll)
        return {name: percentiles(torch.tensor(values)) for name, values in found.items()}


def select_members(
    table: Table,
    masks: Sequence[HeadMask],
    budget: Budget,
    *,
    members: int = 3,
    select: Rows | None = None,
    hold: Rows | None = None,
    objective: EnsembleObjective | None = None,
    beam: int = 3,
    seed: int = 0,
) -> Selection:
    """Choose members out of a table of candidates.

    Selection runs on the whole selecting part, on bags of half of its examples, and without each
    family of outliers (if there are three or more). The results are finalists; held-out examples of
    all families decide between them.

    Args:
        table: The candidates' logits; candidate 0 is the unpruned host.
        masks: The candidates.
        budget: Bounds the members' counted cost.
        members: Number of members M; a mask is chosen twice only if no other fits the budget.
        select, hold: Examples by data set for selection and for the decision; all by default.
        objective: See `EnsembleObjective`.
        beam: Ensembles kept while growing.
        seed: Seed of the bags.
    """

    @cache
    def allowed(members: frozenset[int]) -> bool:
        return budget.allows([masks[i] for i in sorted(members)])

    def fits(members: Sequence[int]) -> bool:
        return allowed(frozenset(members))  # a mask chosen twice runs once

    finalists: dict[tuple[int, ...], None] = {}
    for bag in _bags(table, select, seed):
        selector = Selector(table, objective=objective, select=bag, hold=hold, fits=fits)
        finalists.update(dict.fromkeys(selector.forward(members, beam=beam)))
    if not finalists:
        raise MaskError(
            f"None of {len(masks)} candidates gives {members} members within "
            f"max_cost={budget.max_cost}. Raise max_cost, or build fewer members."
        )
    judge = Selector(table, objective=objective, select=select, hold=hold, fits=fits)
    return judge.choose(list(finalists))


def _bags(table: Table, select: Rows | None, seed: int) -> list[dict[str, Tensor]]:
    """Return the sets of rows to select on: all, without each family, halves."""
    sizes = table.sizes()
    whole = dict(select or {name: torch.arange(size) for name, size in sizes.items()})
    row_sets = [whole]
    families = [family for family in table.families if family in whole]
    if len(families) > 2:
        for family in families:
            row_sets.append({name: rows for name, rows in whole.items() if name != family})
    generator = torch.Generator().manual_seed(seed)
    for _ in range(BAGS):
        halves = {}
        for name, rows in whole.items():
            order = torch.randperm(len(rows), generator=generator)
            halves[name] = rows[order[: (len(rows) + 1) // 2]]
        row_sets.append(halves)
    return row_sets
