"""Members that complement each other: an ensemble selected by its own validation figures.

Forward selection with replacement (Caruana et al., 2004), or a beam of such, over a table of
candidates. What is rewarded is the improvement over the host per family of outliers, mean plus
worst, joined with NLL. Examples are split: one part selects, another decides when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .table import Figures, Table

Rows = Mapping[str, Tensor]
Fits = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class EnsembleObjective:
    """What an ensemble is selected for: gains over the host in points (higher is better).

    gain = mean_f d_f + worst * min_f d_f - nll * max(0, rise of NLL in %) + reward of NLL's fall,
    with d_f the gain in AUROC points on family f, averaged over `scores`.

    Attributes:
        scores: Uncertainty scores that rank; several keep a search from serving only one.
        mean, worst: Weights of the mean and of the worst family.
        nll: Points lost for each percent that NLL rises above the host's, raw or scaled.
        nll_gain: Points won for each percent that it falls below.
        accuracy: Points lost for each point of accuracy below the host's.
        ece, diversity: Points for a lower ECE (points) and for disagreement (percent).
    """

    scores: tuple[str, ...] = ("msp", "energy")
    mean: float = 1.0
    worst: float = 1.0
    nll: float = 1.0
    nll_gain: float = 0.1
    accuracy: float = 0.5
    ece: float = 0.0
    diversity: float = 0.0

    def gains(self, figures: Figures, host: Figures) -> dict[str, float]:
        """Return the gain of each family in AUROC points, mean over scores."""
        return {
            family: 100 * sum(by[s] - host.auroc[family][s] for s in self.scores) / len(self.scores)
            for family, by in figures.auroc.items()
        }

    def value(self, figures: Figures, host: Figures) -> float:
        """Return the gain over the host."""
        gains = list(self.gains(figures, host).values())
        total = self.mean * sum(gains) / len(gains) + self.worst * min(gains) if gains else 0.0
        for mine, theirs in ((figures.nll, host.nll), (figures.nll_scaled, host.nll_scaled)):
            rise = 100 * (mine - theirs) / max(theirs, 1e-9)
            total -= self.nll * max(0.0, rise) - self.nll_gain * max(0.0, -rise)
        total -= self.accuracy * max(0.0, 100 * (host.accuracy - figures.accuracy))
        total -= self.ece * 100 * (figures.ece - host.ece)
        return total + self.diversity * 100 * figures.disagreement


@dataclass(frozen=True)
class Selection:
    """An ensemble that was chosen.

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
        select, hold: Examples that select, and examples that decide when to stop.
        fits: Tells whether members are within the budget.
    """

    def __init__(
        self,
        table: Table,
        *,
        objective: EnsembleObjective | None = None,
        select: Rows | None = None,
        hold: Rows | None = None,
        fits: Fits | None = None,
        folds: int = 1,
    ) -> None:
        self.table = table
        self.objective = objective or EnsembleObjective()
        self.select, self.hold = select, hold
        self.fits = fits or (lambda members: True)
        self._known: dict[tuple[bool, tuple[int, ...]], float] = {}
        self._hosts = {part: self._figures((0,), part) for part in (False, True)}

    def _figures(self, members: Sequence[int], held_out: bool) -> Figures:
        o = self.objective
        return self.table.figures(
            members,
            scores=o.scores,
            rows=self.hold if held_out else self.select,
            detail=bool(o.ece or o.diversity),
        )

    def gain(self, members: Sequence[int], *, held_out: bool = False) -> float:
        """Return the objective of an ensemble, remembered."""
        key = (held_out, tuple(sorted(members)))
        if key not in self._known:
            figures = self._figures(key[1], held_out)
            self._known[key] = self.objective.value(figures, self._hosts[held_out])
        return self._known[key]

    def forward(
        self, members: int, *, beam: int = 3, among: Sequence[int] | None = None
    ) -> list[tuple[int, ...]]:
        """Add members one by one, each the best addition; return the best ensembles, best first."""
        pool = range(self.table.candidates) if among is None else among
        front: list[tuple[int, ...]] = [()]
        for _ in range(members):
            grown = {tuple(sorted((*have, new))) for have in front for new in pool}
            able = [ensemble for ensemble in sorted(grown) if self.fits(ensemble)]
            front = sorted(able, key=lambda e: -self.gain(e))[:beam]
        return front

    def refine(
        self, start: Sequence[int], *, among: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Exchange single members as long as the selecting part improves."""
        pool = range(self.table.candidates) if among is None else among
        best = tuple(sorted(start))
        while True:
            near = {
                tuple(sorted((*best[:i], new, *best[i + 1 :])))
                for i in range(len(best))
                for new in pool
            }
            able = [ensemble for ensemble in sorted(near) if self.fits(ensemble)]
            top = max(able, key=lambda e: (self.gain(e), [-i for i in e]), default=best)
            if self.gain(top) <= self.gain(best) + 1e-9:
                return best
            best = top

    def choose(self, finalists: Sequence[Sequence[int]]) -> Selection:
        """Let the held-out part choose among ensembles that selection found."""
        unique = sorted({tuple(sorted(f)) for f in finalists})
        trail = [
            {
                "members": list(f),
                "gain": self.gain(f),
                "held_out": self.gain(f, held_out=True),
            }
            for f in unique
        ]
        best = max(unique, key=lambda f: (self.gain(f, held_out=True), [-i for i in f]))
        return Selection(
            best, self.gain(best), self.gain(best, held_out=True), trail, self.intervals(best)
        )

    def intervals(
        self, members: Sequence[int], *, draws: int = 100, seed: int = 0
    ) -> dict[str, tuple[float, float]]:
        """Return 95 % bootstrap intervals of the gains, over examples of the held-out part."""
        generator = torch.Generator().manual_seed(seed)
        sizes = self.table.sizes()
        base = self.hold or {name: torch.arange(n) for name, n in sizes.items()}
        found: dict[str, list[float]] = {}
        for _ in range(draws):
            rows = {
                name: index[torch.randint(len(index), (len(index),), generator=generator)]
                for name, index in base.items()
            }
            kwargs = {"scores": self.objective.scores, "rows": rows}
            mine = self.table.figures(members, **kwargs)  # type: ignore[arg-type]
            host = self.table.figures((0,), **kwargs)  # type: ignore[arg-type]
            gains = self.objective.gains(mine, host)
            for family, value in gains.items():
                found.setdefault(f"AUROC {family}", []).append(value)
            found.setdefault("NLL", []).append(mine.nll - host.nll)
        return {
            name: tuple(torch.tensor(v).quantile(torch.tensor([0.025, 0.975])).tolist())  # type: ignore[misc]
            for name, v in found.items()
        }


def settings_of(objective: EnsembleObjective) -> dict[str, Any]:
    """Return plain data."""
    return asdict(objective)


def split_rows(
    sizes: Mapping[str, int], parts: Mapping[str, float], *, seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Split the examples of every data set at random into named parts."""
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, size in sizes.items():
        order = torch.randperm(size, generator=generator)
        start = 0.0
        for part, share in parts.items():
            first, last = round(start * size), round((start + share) * size)
            result[part][name] = order[first:last].sort().values
            start += share
    return result
