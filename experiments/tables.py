"""Rows of a results table: figures of member logits, paired intervals, one JSON record a table.

Every figure is a function of a few columns (one value an example) and of weights: ones give the
figure, counts of a resample give a draw of the bootstrap. Resamples depend on the seed and on the
name of the data set alone, so differences between rows are paired.

A record, as `write` stores it in `results/table_<name>.json`:

    name, title, command, setup: [lines], families: {"seen": [..], "unseen": [..]},
    rows: [{name, cost, draws: [{draw, temperature, raw: {figure: value}, scaled: {..}}],
            bootstrap: {raw: {figure: [low, high]}, scaled: {..}},
            against_single: {raw: {figure: [mean, low, high]}, scaled: {..}}}],
    sweeps: {name: {"x": label, "points": [{"x": .., "cost": .., "raw": {..}, "scaled": {..}}]}},
    paper: {row: {column: value}}, notes: [lines]

Figures are `accuracy, nll, ece, aurc, disagreement, mutual_information`,
`<family>/<msp|energy>/<AUROC|FPR95>`, the means over families `seen/..`, `unseen/..`, `all/..`, and
`<shift>/accuracy`, `<shift>/nll`, `<shift>/ece` with their mean `shift/..`. All are in percent but
nll and mutual_information. OOD is positive. `scaled` divides the members' logits by one
temperature, fitted for every row in the same way.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.metrics_classification import BINS, negative_log_likelihood
from hydra_ensembles.uncertainty import (
    disagreement,
    mean_probability,
    mutual_information,
    score_logits,
)

RESULTS = Path(__file__).parent / "results"
SCORES = ("msp", "energy")
KINDS = ("raw", "scaled")
LOWER_IS_BETTER = ("nll", "ece", "aurc", "FPR95")

Figures = dict[str, float]


@dataclass
class Outputs:
    """Member logits `[example, member, class]` of one row on all test data, for one draw.

    Attributes:
        test: on the labelled test data.
        labels: of the test data.
        families: on OOD test sets by name.
        temperature: of the scaled figures.
        seen: names of families of which the search saw other examples.
        shifts: `(logits, labels)` on shifted test data by name.
        draw: number of the draw of validation data (or of training).
        scores: uncertainty scores, each a column.
        logit_scale: what multiplies the cosines in zero-shot logits, read by the score `mcm`.
    """

    test: Tensor
    labels: Tensor
    families: Mapping[str, Tensor]
    temperature: float = 1.0
    seen: Sequence[str] = ()
    shifts: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    draw: int = 0
    scores: Sequence[str] = SCORES
    logit_scale: float | None = None


def figures(
    test: Tensor,
    labels: Tensor,
    families: Mapping[str, Tensor],
    temperature: float = 1.0,
    *,
    seen: Sequence[str] = (),
    shifts: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> dict[str, Figures]:
    """Return `{"raw": figures, "scaled": figures}` of member logits; see `Outputs`."""
    return figures_of(Outputs(test, labels, families, temperature, seen, shifts or {}))


def figures_of(outputs: Outputs) -> dict[str, Figures]:
    """Return `{"raw": figures, "scaled": figures}`."""
    return {
        kind: {key: float(value[0]) for key, value in found.items()}
        for kind, found in _by_kind(outputs, None).items()
    }


def mean_figures(draws: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the means over draws of the figures that all draws have."""
    return {
        kind: {
            key: sum(one[kind][key] for one in draws) / len(draws)
            for key in draws[0][kind]
            if all(key in one[kind] for one in draws)
        }
        for kind in KINDS
    }


def bootstrap(draws: Sequence[Outputs], *, count: int = 200, seed: int = 0) -> dict[str, Any]:
    """Return `{kind: {figure: [count]}}` on resampled test examples, each the mean over draws."""
    found = [_by_kind(outputs, (count, seed)) for outputs in draws]
    return {
        kind: {
            key: torch.stack([one[kind][key] for one in found]).mean(0)
            for key in found[0][kind]
            if all(key in one[kind] for one in found)
        }
        for kind in KINDS
    }


def table_rows(
    rows: Mapping[str, tuple[float, Sequence[Outputs]]],
    *,
    against: Sequence[str] = ("single",),
    count: int = 200,
    seed: int = 0,
    known: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return a record's rows from `{name: (cost, draws)}`, compared in pairs with some of them.

    Figures and resamples of rows by name are read from and added to `known`, where given.
    """
    known = {} if known is None else known
    for name, (_, draws) in rows.items():
        if name not in known:
            points = [
                {"draw": one.draw, "temperature": one.temperature, **figures_of(one)}
                for one in draws
            ]
            known[name] = {"draws": points, **bootstrap(draws, count=count, seed=seed)}
    result = []
    for name, (cost, _) in rows.items():
        row: dict[str, Any] = {"name": name, "cost": cost, "draws": known[name]["draws"]}
        row["bootstrap"] = {
            kind: {key: _range(values) for key, values in known[name][kind].items()}
            for kind in KINDS
        }
        for other in against:
            if other in rows and other != name:
                row[f"against_{other}"] = {
                    kind: {
                        key: [float((values - theirs[key]).mean()), *_range(values - theirs[key])]
                        for key, values in known[name][kind].items()
                        if key in theirs
                    }
                    for kind in KINDS
                    for theirs in [known[other][kind]]
                }
        result.append(row)
    return result


def _range(values: Tensor) -> list[float]:
    return values.nanquantile(values.new_tensor([0.025, 0.975])).tolist()


def _by_kind(outputs: Outputs, resample: tuple[int, int] | None) -> dict[str, dict[str, Tensor]]:
    """Return every figure under all weights, `[weights]`."""

    def weights(name: str, size: int) -> Tensor:
        if resample is None:
            return torch.ones(size, 1, dtype=torch.float64)
        return _counts(name, size, *resample)

    result = {}
    for kind, divide in zip(KINDS, (1.0, outputs.temperature), strict=True):
        own = outputs.test.double() / divide
        mine = weights("id", len(own))
        found = _labelled(own, outputs.labels, mine)
        # MCM reads cosines, whatever the temperature
        scale = None if outputs.logit_scale is None else outputs.logit_scale / divide
        for score in outputs.scores:
            inside = score_logits(own, score, logit_scale=scale)
            for name, logits in outputs.families.items():
                outside = score_logits(logits.double() / divide, score, logit_scale=scale)
                both = _separation(inside, outside, mine, weights(name, len(outside)))
                found |= {f"{name}/{score}/{figure}": value for figure, value in both.items()}
        for name, (logits, labels) in outputs.shifts.items():
            shifted = _labelled(logits.double() / divide, labels, weights(name, len(logits)))
            for figure in ("accuracy", "nll", "ece"):
                found[f"{name}/{figure}"] = shifted[figure]
        groups = {
            "seen": [name for name in outputs.families if name in outputs.seen],
            "unseen": [name for name in outputs.families if name not in outputs.seen],
            "all": list(outputs.families),
            "shift": list(outputs.shifts),
        }
        for group, names in groups.items():
            for key in [key for key in found if names and key.startswith(f"{names[0]}/")]:
                figure = key.removeprefix(f"{names[0]}/")
                found[f"{group}/{figure}"] = torch.stack(
                    [found[f"{name}/{figure}"] for name in names]
                ).mean(0)
        result[kind] = found
    return result


@functools.lru_cache(maxsize=64)
def _counts(name: str, size: int, count: int, seed: int) -> Tensor:
    """Return how often each example of a set is in each resample, `[example, draw]`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    chosen = torch.randint(size, (count, size), generator=generator)
    return torch.stack([torch.bincount(one, minlength=size) for one in chosen], 1).double()


def _labelled(logits: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the figures of labelled data; weights `[example, draw]`."""
    total = weights.sum(0)
    confidence, predicted = mean_probability(logits).max(-1)
    correct = (predicted == labels).double()
    columns = {
        "accuracy": 100 * correct,
        "nll": negative_log_likelihood(logits, labels).double(),
        "disagreement": 100 * disagreement(logits).double(),
        "mutual_information": mutual_information(logits).double(),
    }
    found = {name: values @ weights / total for name, values in columns.items()}
    # in float32 and right-closed as torchmetrics bins
    place = ((confidence.float() * BINS).ceil().long() - 1).clamp(0, BINS - 1)
    gaps = torch.zeros(BINS, weights.shape[1], dtype=torch.float64)
    gaps.index_add_(0, place, weights * (confidence.float().double() - correct)[:, None])
    found["ece"] = 100 * gaps.abs().sum(0) / total
    order = score_logits(logits, "msp").argsort(stable=True)
    answered = weights[order].cumsum(0)
    wrong = (weights * (1 - correct)[:, None])[order].cumsum(0)
    area = torch.trapezoid(wrong / answered.clamp_min(1), answered / total, dim=0)
    found["aurc"] = 100 * area / (1 - 1 / total)
    return found


def _separation(inside: Tensor, outside: Tensor, mine: Tensor, theirs: Tensor) -> dict[str, Tensor]:
    """Return AUROC and FPR95 of OOD (positive) against ID examples, ties counted by halves."""
    levels, ranks = torch.cat([inside, outside]).unique(return_inverse=True)
    ranks = len(levels) - 1 - ranks  # from the highest score down
    shape = (len(levels), mine.shape[1])
    negatives = torch.zeros(shape, dtype=torch.float64).index_add_(0, ranks[: len(inside)], mine)
    positives = torch.zeros(shape, dtype=torch.float64).index_add_(0, ranks[len(inside) :], theirs)
    alarms = negatives.cumsum(0)
    below = alarms[-1] - alarms + negatives / 2
    area = (positives * below).sum(0) / (positives.sum(0) * alarms[-1])
    # the first level at which 95 % of the positives are flagged
    first = (positives.cumsum(0) / positives.sum(0) >= 0.95).int().argmax(0, keepdim=True)
    return {"AUROC": 100 * area, "FPR95": 100 * alarms.gather(0, first)[0] / alarms[-1]}


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 95 %, by degrees of freedom


def over_draws(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval over draws (NaN for one draw)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, STUDENT[min(len(values), 10) - 2] * spread / math.sqrt(len(values))


def write(record: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a record whole; figures rounded to 4 digits after the point."""
    path = folder / f"table_{record['name']}.json"
    write_whole(path, json.dumps(_rounded(record), indent=1) + "\n")
    return path


def read(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Read a record, None when it was never written."""
    path = folder / f"table_{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_rounded(one) for one in value]
    return value
