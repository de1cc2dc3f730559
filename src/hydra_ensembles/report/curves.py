"""From a record of results to the points of its curves: plain lists, thin enough to embed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError
from ..evaluation.metrics import calibration_bins, risk_coverage

if TYPE_CHECKING:
    from ..evaluation.results import Results

POINTS = 240
"""At most this many points a curve: more cannot be seen."""

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram: examples whose confidence falls into [low, high]."""

    low: float
    high: float
    confidence: float
    accuracy: float
    count: int


def columns(results: Results, name: str) -> dict[str, Tensor]:
    """Return the columns of one set, or say how to get them."""
    if name not in results.examples:
        raise DataError(
            f"The results of {results.name!r} hold no examples of {name!r}: curves need them. "
            "Evaluate again, or load results that were saved with their examples."
        )
    return results.examples[name]


def uncertainty(results: Results, name: str, score: str | None = None) -> Tensor:
    """Return a score of one set's examples `[example]`; the main one by default."""
    return columns(results, name)[f"score:{score or results.scores[0]}"].double()


def knows(results: Results, name: str) -> bool:
    """Tell whether the novelty of the test data and of an OOD set was measured."""
    sets = (results.examples.get(key, {}) for key in ("id", f"ood/{name}"))
    return all("score:novelty" in columns for columns in sets)


def ood_names(results: Results) -> list[str]:
    """Return the out-of-distribution sets by their short names."""
    return [key.removeprefix("ood/") for key in results.examples if key.startswith("ood/")]


def reliability(results: Results, *, bins: int = 15) -> list[Bin]:
    """Return the bars of the reliability diagram; empty bins are left out."""
    part = columns(results, "id")
    if "probabilities" in part:  # of several labels: each is a yes or a no of its own
        confidence, correct = part["probabilities"].flatten().float(), part["targets"].flatten()
    else:
        confidence, correct = part["confidence"], part["correct"]
    sums = calibration_bins(confidence, correct.bool(), bins=bins)
    sums[:, -2] += sums[:, -1]  # a confidence of 1 has a bin of its own there
    counts, confidence, right = sums[:, :-1].tolist()
    return [
        Bin(i / bins, (i + 1) / bins, confidence[i] / n, right[i] / n, int(n))
        for i, n in enumerate(counts)
        if n
    ]


def roc(results: Results, name: str, score: str | None = None) -> Curve:
    """Return (false, true) positive rates of one OOD set by a score, OOD positive."""
    inside, outside = (uncertainty(results, part, score) for part in ("id", f"ood/{name}"))
    values = torch.cat([inside, outside]).unique()
    # one point for each threshold: how many scores are at least that high
    false = 1 - torch.searchsorted(inside.sort().values, values).double() / len(inside)
    true = 1 - torch.searchsorted(outside.sort().values, values).double() / len(outside)
    points = [(0.0, 0.0), *zip(false.flip(0).tolist(), true.flip(0).tolist(), strict=True)]
    return thin(points)


def risk_curve(results: Results) -> Curve:
    """Return (coverage, error rate among the answered), from the surest examples on."""
    part = columns(results, "id")
    coverage, risk = risk_coverage(uncertainty(results, "id"), ~part["correct"].bool())
    return thin(list(zip(coverage.tolist(), risk.tolist(), strict=True)))


def answered_at(results: Results, *, steps: int = 100) -> dict[str, list[float]]:
    """Return what happens at each threshold that answers 1/steps ... all of the test examples.

    `threshold`, `coverage`, `risk` (error rate among the answered) and, for every OOD set, the
    share of its examples that would be answered, under `ood/<name>`.
    """
    scores, wrong = uncertainty(results, "id"), ~columns(results, "id")["correct"].bool()
    ordered = scores.sort().values
    table: dict[str, list[float]] = {"threshold": [], "coverage": [], "risk": []}
    sets = {f"ood/{name}": uncertainty(results, f"ood/{name}") for name in ood_names(results)}
    table |= {name: [] for name in sets}
    for step in range(1, steps + 1):
        threshold = ordered[max(0, round(step * len(ordered) / steps) - 1)]
        answered = scores <= threshold
        table["threshold"].append(float(threshold))
        table["coverage"].append(float(answered.double().mean()))
        table["risk"].append(float(wrong[answered].double().mean()))
        for name, outside in sets.items():
            table[name].append(float((outside <= threshold).double().mean()))
    return table


def thin(points: Curve, most: int = POINTS) -> Curve:
    """Keep the ends and evenly spaced points between them; drop repeated ones."""
    points = [p for i, p in enumerate(points) if i == 0 or p != points[i - 1]]
    if len(points) <= most:
        return points
    step = (len(points) - 1) / (most - 1)
    return [points[round(i * step)] for i in range(most)]


def pareto_front(points: Sequence[tuple[float, float]], *, sign: int) -> list[tuple[float, float]]:
    """Return the (cost, value) points that no cheaper or equally cheap point equals in value.

    Args:
        points: In any order.
        sign: 1 when a higher value is better, -1 when a lower one is.
    """
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not front or sign * value > sign * front[-1][1]:
            front.append((cost, value))
    return front
