"""Objectives of a circuit: functions of logits on several data sets; **lower is better**.

Data sets are named: `"id"` has labels; `"ood/<family>"` are outliers; `"shift"` is in-distribution
data under corruption, with labels. An effect comes with a standard error over examples: from
per-example parts if the objective is a mean of them (DeLong's placements for AUROC), otherwise by a
jackknife over 20 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..evaluation.metrics import expected_calibration_error
from ..registry import Registry
from ..uncertainty import Score, mean_probability
from .trunk_cache import Outputs

GROUPS = 20
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """An objective; **lower is better**.

    Attributes:
        name: Name of the objective.
        value: Maps outputs (logits [example, member, class] by data set) to a number.
        parts: Maps outputs to one number per example, whose means add up to the value (up to a
            constant); None if there are no such parts.
        needs: Kinds of data that it reads: `"id"`, `"ood"`, `"shift"`.
    """

    name: str
    value: Callable[[Outputs], float]
    parts: Callable[[Outputs], Parts] | None = None
    needs: tuple[str, ...] = ("id",)


objectives: Registry[Callable[[str | Score], Objective]] = Registry("objective")
"""Objectives by name: functions from an uncertainty score to an `Objective`."""


def as_objective(objective: Any, score: str | Score = "msp") -> Objective:
    """Return an objective from its name, an `Objective` or a function of outputs."""
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, str):
        return objectives[objective](score)
    if callable(objective):
        name = getattr(objective, "__name__", type(objective).__name__)
        return Objective(name, lambda outputs: float(objective(outputs)))
    raise TypeError(
        f"objective is a {type(objective).__name__}; expected a name ({', '.join(objectives)}), an "
        "Objective, or a function of Outputs that is lower when better."
    )


def families(outputs: Outputs) -> list[str]:
    """Return the outlier data sets."""
    return [name for name in outputs.logits if name.startswith("ood")]


def placements(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of outliers above each ID example, and of ID below each outlier.

    Ties count half. The mean of either is the AUROC (DeLong et al., 1988).
    """
    inliers, outliers = id_scores.double(), ood_scores.double()
    low, high = inliers.sort().values, outliers.sort().values
    under = (torch.searchsorted(high, inliers) + torch.searchsorted(high, inliers, right=True)) / 2
    above = len(outliers) - under
    below = (torch.searchsorted(low, outliers) + torch.searchsorted(low, outliers, right=True)) / 2
    return above / len(outliers), below / len(inliers)


@objectives.register("id-loss")
def id_loss(score: str | Score = "msp") -> Objective:
    """Loss of the mean answer on in-distribution data: NLL of classes, else the task's own."""
    return _loss("id-loss", "id")


@objectives.register("nll-shift")
def nll_shift(score: str | Score = "msp") -> Objective:
    """Loss of the mean answer under corruption, as `id-loss`."""
    return _loss("nll-shift", "shift")


def _loss(name: str, data: str) -> Objective:
    def parts(outputs: Outputs) -> Parts:
        if data not in outputs.logits:
            raise DataError(f"The objective {name!r} needs data under {data!r}: pass {data}=.")
        return {data: outputs.losses(data).double()}

    return Objective(name, lambda o: float(parts(o)[data].mean()), parts, needs=(data,))


@objectives.register("ood-auroc")
def ood_auroc(score: str | Score = "msp") -> Objective:
    """1 - AUROC of ID against outliers, mean over families, by an uncertainty score."""

    def parts(outputs: Outputs) -> Parts:
        names = families(outputs)
        if not names:
            raise DataError('The objective "ood-auroc" needs outliers: pass ood=, or ood="auto".')
        inliers = outputs.score("id", score)
        shares: Parts = {"id": torch.zeros(len(inliers), dtype=torch.float64)}
        for name in names:
            above, below = placements(inliers, outputs.score(name, score))
            shares["id"] -= above / len(names)
            shares[name] = -below / len(names)
        return shares

    def value(outputs: Outputs) -> float:
        shares = parts(outputs)
        return 1.0 + float(sum(shares[name].mean() for name in families(outputs)))

    return Objective("ood-auroc", value, parts, needs=("id", "ood"))


@objectives.register("ece")
def ece(score: str | Score = "msp") -> Objective:
    """Expected calibration error on in-distribution data (15 bins, L1)."""

    def value(outputs: Outputs) -> float:
        if not outputs.task.classifies:
            raise DataError(f"The objective 'ece' needs classes; this is {outputs.task.title}.")
        confidence, label = mean_probability(outputs.logits["id"]).max(-1)
        return float(expected_calibration_error(confidence, label == outputs.labels["id"]))

    return Objective("ece", value)


def average_of(
    score: str | Score, kinds: Sequence[str], *, classes: bool = True
) -> list[Objective]:
    """Return the objectives that `average` combines, as far as they have data and classes."""
    names = ["id-loss", *["ece"] * classes]
    names += ["ood-auroc"] if "ood" in kinds else []
    names += ["nll-shift"] if "shift" in kinds else []
    return [objectives[name](score) for name in names]


@objectives.register("average")
def average(score: str | Score = "msp") -> Objective:
    """Mean of the objectives' z-scored harms; the search standardises them within each layer."""

    def value(outputs: Outputs) -> float:
        kinds = {name.split("/")[0] for name in outputs.logits}
        return sum(
            o.value(outputs)
            for o in average_of(score, sorted(kinds), classes=outputs.task.classifies)
        )

    return Objective("average", value, needs=("id",))


def effect(objective: Objective, changed: Outputs, base: Outputs) -> tuple[float, float]:
    """Return how much the objective rises from `base` to `changed`, and its standard error.

    The two are paired by example, so that what they share cancels.
    """
    difference = objective.value(changed) - objective.value(base)
    if objective.parts is not None:
        after, before = objective.parts(changed), objective.parts(base)
        gaps = [after[name] - before[name] for name in after]
        variance = sum(float(gap.var()) / len(gap) for gap in gaps if len(gap) > 1)
        return difference, variance**0.5
    return difference, _jackknife(objective, changed, base)


def _jackknife(objective: Objective, changed: Outputs, base: Outputs) -> float:
    """Leave out one of 20 groups of examples at a time."""
    sizes = {name: len(logits) for name, logits in base.logits.items()}
    groups = min(GROUPS, *sizes.values())
    if groups < 2:
        return 0.0
    values = []
    for group in range(groups):
        rows = {
            name: torch.arange(n)[torch.arange(n) % groups != group] for name, n in sizes.items()
        }
        values.append(
            objective.value(changed.examples(rows)) - objective.value(base.examples(rows))
        )
    estimates = torch.tensor(values, dtype=torch.float64)
    return float(((groups - 1) / groups * ((estimates - estimates.mean()) ** 2).sum()).sqrt())
