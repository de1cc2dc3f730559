"""The record of a pruning sweep: it prints, saves and answers with intervals."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from .._records import read_record, to_record
from .._tables import markdown_table
from ..errors import FormatError, UnknownNameError
from ..evaluation.intervals import Interval, student, two_way_bootstrap
from ..heads.head_mask import HeadMask, HeadScores

QUALITY, STABILITY = "cls/Acc", "stability"


def regime(ratio: float) -> str:
    """Name the regime of a pruning ratio.

    Few heads gone is *redundancy* (what goes was hardly used), many is *specialisation* (heads
    that do something of their own have to go). HIES reports the crossing between 10 and 30 %.
    """
    return "redundancy" if ratio <= 0.2 else "specialisation"


@dataclass(frozen=True)
class SweepPoint:
    """The mask of one criterion, ratio and calibration draw."""

    criterion: str
    ratio: float
    draw: int
    mask: str


@dataclass(frozen=True)
class Outcome:
    """Figures of one mask, and whether each example was right and unchanged."""

    figures: dict[str, float]
    right: str
    same: str


@dataclass
class PruneSweep:
    """Quality, stability, calibration and OOD detection over pruning ratios.

    Attributes:
        model: Name of the host.
        examples: Number of examples that the figures are about.
        calibration_examples: Number of examples of each calibration draw.
        scope: Whether heads were ranked over the `"model"` or in each `"layer"`.
        baseline: Figures of the unpruned model.
        points: Every criterion, ratio and draw.
        outcomes: What each distinct mask did.
        scores: Mean scores of each criterion over the draws, as the criterion defines them.
        score_names: What each draw's scores are called: the alpha that `hies` chose, say.
        lower_is_kept: Criteria whose low scores are kept.
    """

    model: str
    examples: int
    calibration_examples: int
    scope: str
    baseline: dict[str, float]
    points: list[SweepPoint]
    outcomes: dict[str, Outcome]
    scores: dict[str, HeadScores]
    score_names: dict[str, list[str]] = field(default_factory=dict)
    lower_is_kept: list[str] = field(default_factory=list)

    @property
    def criteria(self) -> list[str]:
        """Labels of the criteria, in the order in which they were asked for."""
        return list(dict.fromkeys(point.criterion for point in self.points))

    @property
    def ratios(self) -> list[float]:
        """Pruning ratios, in order."""
        return sorted({point.ratio for point in self.points})

    @property
    def draws(self) -> int:
        """Number of calibration draws."""
        return len({point.draw for point in self.points})

    @property
    def metrics(self) -> list[str]:
        """Names of the figures."""
        return list(self.baseline)

    def at(self, criterion: str, ratio: float) -> list[Outcome]:
        """Return the outcomes of all draws of a criterion at a ratio."""
        found = [
            self.outcomes[p.mask]
            for p in sorted(self.points, key=lambda p: p.draw)
            if p.criterion == criterion and math.isclose(p.ratio, ratio)
        ]
        if not found:
            raise UnknownNameError(
                f"The sweep has no {criterion!r} at ratio {ratio}. It has "
                f"{', '.join(self.criteria)} at {self.ratios}."
            )
        return found

    def values(self, criterion: str, ratio: float, metric: str = QUALITY) -> list[float]:
        """Return one figure for each draw."""
        return [outcome.figures[metric] for outcome in self.at(criterion, ratio)]

    def interval(self, criterion: str, ratio: float, metric: str = QUALITY) -> Interval:
        """Return the mean over draws and its 95 % interval.

        Accuracy and stability: a bootstrap over calibration draws and examples at once; other
        figures: Student's t over the draws.
        """
        if metric in (QUALITY, STABILITY):
            return two_way_bootstrap(self._hits(criterion, ratio, metric))
        return student(self.values(criterion, ratio, metric))

    def difference(self, one: str, other: str, ratio: float, metric: str = QUALITY) -> Interval:
        """Return the mean of `one` minus `other`, paired by draw and example, and its interval."""
        if metric in (QUALITY, STABILITY):
            gaps = self._hits(one, ratio, metric) - self._hits(other, ratio, metric)
            return two_way_bootstrap(gaps)
        pairs = zip(self.values(one, ratio, metric), self.values(other, ratio, metric), strict=True)
        return student([a - b for a, b in pairs])

    def _hits(self, criterion: str, ratio: float, metric: str) -> Tensor:
        """Return 0/1 for each draw and example."""
        side = "right" if metric == QUALITY else "same"
        rows = [unpack(getattr(o, side), self.examples) for o in self.at(criterion, ratio)]
        return torch.stack(rows).double()

    def markdown(self, metric: str = QUALITY) -> str:
        """Return a Markdown table in percent: criteria by ratios, mean and half of the interval."""
        head = [f"{ratio:.0%} ({regime(ratio)})" for ratio in self.ratios]
        rows = [[metric, *head]]
        for criterion in self.criteria:
            cells = []
            for ratio in self.ratios:
                i = self.interval(criterion, ratio, metric)
                cells.append(f"{100 * i.value:.1f} ± {50 * (i.high - i.low):.1f}")
            rows.append([criterion, *cells])
        before = f"{100 * self.baseline[metric]:.1f}"
        return markdown_table([*rows, ["*unpruned*", *[before] * len(head)]])

    def __str__(self) -> str:
        title = (
            f"PruneSweep of {self.model}: {self.draws} draws of {self.calibration_examples} "
            f"calibration examples, {self.examples} test examples, ranked by {self.scope}"
        )
        tables = [self.markdown(m) for m in (QUALITY, STABILITY)]
        return "\n\n".join([title, *tables])

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the record as JSON text; write it to `path` (beside, then renamed) when given."""
        payload = {
            "model": self.model,
            "examples": self.examples,
            "calibration_examples": self.calibration_examples,
            "scope": self.scope,
            "baseline": self.baseline,
            "points": [asdict(point) for point in self.points],
            "outcomes": {key: asdict(outcome) for key, outcome in self.outcomes.items()},
            "scores": {name: table.tolist() for name, table in self.scores.items()},
            "score_names": self.score_names,
            "lower_is_kept": self.lower_is_kept,
        }
        return to_record("PruneSweep", payload, path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> PruneSweep:
        """Read a record from JSON text or from a file's path."""
        payload = read_record("PruneSweep", source)
        del payload["kind"], payload["version"]
        return cls(
            **{
                **payload,
                "points": [SweepPoint(**point) for point in payload["points"]],
                "outcomes": {key: Outcome(**o) for key, o in payload["outcomes"].items()},
                "scores": {n: HeadScores(rows, name=n) for n, rows in payload["scores"].items()},
            }
        )


def mask_key(mask: HeadMask) -> str:
    """Write a mask as one digit per head, with a dot between layers: `101.111`."""
    return ".".join("".join(str(int(kept)) for kept in row) for row in mask.tolist())


def pack(flags: Tensor) -> str:
    """Write yes/no flags as hexadecimal text."""
    digits = "".join(str(int(flag)) for flag in flags.tolist())
    return f"{int('1' + digits, 2):x}"


def unpack(text: str, count: int) -> Tensor:
    """Read flags that `pack` wrote."""
    digits = f"{int(text, 16):b}"[1:]
    if len(digits) != count:
        raise FormatError(f"{len(digits)} flags were saved but {count} are expected.")
    return torch.tensor([digit == "1" for digit in digits])


def rank_correlation(
    scores: Mapping[str, HeadScores], *, lower_is_kept: Sequence[str] = ()
) -> tuple[list[str], Tensor]:
    """Return Spearman's rank correlation between criteria, ties at their mean rank.

    Criteria whose low scores are kept are turned round first, so 1 means "keeps the same heads".

    Returns:
        The labels and a symmetric matrix `[criteria, criteria]` in [-1, 1]; constant scores give 0.
    """
    names = list(scores)
    ranks = []
    for name in names:
        flat = scores[name].flat()
        flat = -flat if name in lower_is_kept else flat
        below = (flat[None, :] < flat[:, None]).sum(1).double()
        equal = (flat[None, :] == flat[:, None]).sum(1).double()
        ranks.append(below + (equal - 1) / 2)
    centred = torch.stack([rank - rank.mean() for rank in ranks])
    norms = centred.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, centred / norms.clamp_min(1e-12), 0.0)
    return names, unit @ unit.t()
