"""Choose a calibration by examples that it was not fitted on.

Temperatures are cross-fitted: every example is judged under temperatures that were fitted without
it (five folds). Three ways compete out of fold, on held-out examples: no temperature, one for the
mean, and one per member with one for the mean. Among those that raise neither NLL nor ECE, the one
with the lowest NLL is fitted on all examples.

A calibrator with more numbers (vector scaling, isotonic regression, Platt scaling of each label, a
variance that follows the members' spread) replaces them only where its gain is clear: the 95 %
interval of the paired difference in NLL lies below 0. The record says in a line what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnknownNameError
from ..tasks import Regression, Task
from ..uncertainty import (
    Calibrator,
    as_calibrator,
    find_temperature,
    mean_probability,
    nll_of,
    scale_logits,
)
from ..uncertainty.calibrator_fit import (
    EACH,
    LEAST,
    fit_isotonic,
    fit_scale_shift,
    fit_variance,
    gaussian_nll,
)
from ..uncertainty.temperatures import LEAST as FEW
from .intervals import student as paired
from .metrics import expected_calibration_error, once
from .task_metrics import LabelFigures

FOLDS = 5
USUAL = "temperatures only"
EVERY = slice(None)
NOTHING: Mapping[str, str] = {}
VARIANCES = {"residual": "one variance", "variance": "a variance that follows the members' spread"}
FITS = {"vector": fit_scale_shift, "platt": fit_scale_shift, "isotonic": fit_isotonic}
"""What fits the calibrators of logits, by the names that tasks list."""


class Calibration(NamedTuple):
    """What is done to the outputs: temperatures of the members and of the mean, a calibrator."""

    member_temperatures: list[float] | None = None
    temperature: float | None = None
    calibrator: Calibrator | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return calibrated logits."""
        scaled = scale_logits(
            logits, temperature=self.temperature, member_temperatures=self.member_temperatures
        )
        return scaled if self.calibrator is None else self.calibrator(scaled)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a record holds it."""
        calibrator = None if self.calibrator is None else self.calibrator.to_dict()
        return {**self._asdict(), "calibrator": calibrator}


def calibration_of(record: Mapping[str, Any]) -> Calibration:
    """Return the calibration that a record holds."""
    calibrator = as_calibrator(record.get("calibrator"))
    return Calibration(record["member_temperatures"], record["temperature"], calibrator)


Fit = Callable[[Tensor, Tensor], Calibration]


def cross_fit(
    member_logits: Tensor,
    labels: Tensor,
    host_logits: Tensor,
    *,
    held_out: Tensor | None = None,
    fitted: Tensor | None = None,
    calibrators: Mapping[str, str] = NOTHING,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Fit a calibration; return it as plain data, and all logits calibrated out of fold.

    Args:
        member_logits: Raw logits of the ensemble, `[example, member, class]`.
        labels: `[example]`, or `[example, label]` of 0 and 1.
        host_logits: Logits of the plain host on the same examples, `[example, 1, class]`.
        held_out: Which examples took no part in choosing members, `[example]`; all by default. They
            decide, and the figures are theirs.
        fitted: Which examples may be fitted on, `[example]`; all by default.
        calibrators: What else may be fitted, `task.calibrators`; only temperatures by default.
        seed: Seed of the folds.

    Returns:
        `temperature`, `member_temperatures` (1 where nothing is gained), `calibrator` and
        `figures`: NLL and ECE (in %) of host and ensemble before and after, out of fold, the way
        that was chosen, and why. And the ensemble's logits out of fold.
    """
    everything = torch.ones(len(labels), dtype=torch.bool)
    held_out = everything if held_out is None else held_out
    fitted = everything if fitted is None else fitted
    folds = folds_of(labels, fitted, seed)
    members = member_logits.shape[1]
    ways: dict[str, Fit] = {"none": lambda logits, labels: Calibration([1.0] * members, 1.0)}
    judged = {"none": member_logits}
    unsupported = find_temperature(member_logits[fitted], labels[fitted]).note
    if not unsupported:
        ways["mean"] = fit_mean
        if members > 1:  # for one member both are the same
            ways["members and mean"] = fit_members_and_mean
        for name in list(ways)[1:]:
            judged[name] = out_of_fold(member_logits, labels, folds, ways[name])
    figures = {
        name: _before_after(member_logits, logits, labels, held_out)
        for name, logits in judged.items()
    }

    def able(name: str) -> bool:
        return all(old >= new for old, new in figures[name].values())

    loss = {name: both["NLL"][1] for name, both in figures.items()}
    # ties: the simplest
    best = min(filter(able, judged), key=lambda name: round(loss[name], 7))
    why = ""
    tried = supported(calibrators, labels[fitted], member_logits.shape[-1])
    for name in tried:
        ways[name] = partial(fit_more, base=ways[best], fit=FITS[name])
        judged[name] = out_of_fold(member_logits, labels, folds, ways[name])
        figures[name] = _before_after(member_logits, judged[name], labels, held_out)
        loss[name] = figures[name]["NLL"][1]
    if tried:
        losses = {n: nll_of(judged[n][held_out], labels[held_out]) for n in (best, *tried)}
        best, why = choose(losses, {best: USUAL, **calibrators}, allowed=[*filter(able, tried)])
    calibration = ways[best](member_logits[fitted], labels[fitted])
    scaled = out_of_fold(host_logits, labels, folds, fit_mean)
    host = _before_after(host_logits, scaled, labels, held_out)
    if any(new > old for old, new in host.values()):
        host = _before_after(host_logits, host_logits, labels, held_out)
    report: dict[str, Any] = {
        "way": best,
        "fitted_on": int(fitted.sum()),
        "examples": int(held_out.sum()),
        "folds": len(folds),
        "nll_by_way": loss,
        "ensemble": figures[best],
        "host": host,
    }
    if why:
        report["why"] = why
    if best == "none":
        report["note"] = unsupported or _refused(figures)
    return {**calibration.to_dict(), "figures": report}, judged[best]


def fit_answer(
    task: Task,
    outputs: Tensor,
    labels: Tensor,
    *,
    kind: str = "auto",
    student: Tensor | None = None,
    held_out: Tensor | slice = EVERY,
    seed: int = 0,
) -> tuple[Calibration, dict[str, Any]]:
    """Calibrate what answers: one temperature, and more where its gain is clear.

    Args:
        task: What the outputs mean.
        outputs: Raw outputs that answer, `[example, member, ...]`; of numbers the members'.
        labels: As `task.check_labels` returned them.
        kind: `"auto"`, `"none"`, `"temperature"`, or one of `task.calibrators`.
        student: Numbers that answer for the members, `[example, number]`.
        held_out: Which examples decide, `[example]`; all by default.
        seed: Seed of the folds.

    Returns:
        The calibration, and what a record says about it.
    """
    named = ("auto", "none", *(["temperature"] if task.has_temperatures else []), *task.calibrators)
    if kind not in named:
        raise UnknownNameError(
            f"{task.title.capitalize()} has no calibrator {kind!r}; expected one of "
            f"{', '.join(named)}."
        )
    record: dict[str, Any] = {"examples": len(labels)}
    if kind == "none" or not task.calibrators:
        return Calibration(), record | {"note": f"{task.title}: not calibrated"}
    if isinstance(task, Regression):
        found, record, _ = cross_fit_numbers(
            outputs, labels, kind=kind, student=student, held_out=held_out, seed=seed
        )
        return found, record
    fit = find_temperature(outputs, labels)
    record |= asdict(fit)
    base = Calibration(None, fit.temperature)
    if kind == "temperature":
        return base, record
    if kind != "auto":
        calibrator = FITS[kind](base(outputs), labels)
        return base._replace(calibrator=calibrator), record | {"way": kind}
    tried = supported(task.calibrators, labels, outputs.shape[-1])
    if not tried:
        return base, record
    folds = folds_of(labels, torch.ones(len(labels), dtype=torch.bool), seed)
    fits: dict[str, Fit] = {"temperature": fit_mean}
    fits |= {name: partial(fit_more, base=fit_mean, fit=FITS[name]) for name in tried}
    losses = {
        name: nll_of(out_of_fold(outputs, labels, folds, fit)[held_out], labels[held_out])
        for name, fit in fits.items()
    }
    titles = {"temperature": USUAL, **task.calibrators}
    best, why = choose(losses, titles, allowed=tried)
    record |= {"way": best, "why": why}
    return base._replace(calibrator=fits[best](outputs, labels).calibrator), record


def cross_fit_numbers(
    members: Tensor,
    targets: Tensor,
    *,
    kind: str = "auto",
    student: Tensor | None = None,
    held_out: Tensor | slice = EVERY,
    fitted: Tensor | None = None,
    seed: int = 0,
) -> tuple[Calibration, dict[str, Any], Tensor | None]:
    """Fit the variance of numbers: one for all inputs, or one that follows the members' spread.

    Args:
        members: The members' numbers, `[example, member, number]`.
        targets: True numbers, `[example, number]`.
        kind, student, held_out, seed: See `fit_answer`.
        fitted: Which examples may be fitted on, `[example]`; all by default.

    Returns:
        The calibration, what a record says about it, and the standard deviations out of fold,
        `[example, number]`; None where there are too few examples.
    """
    rows = torch.ones(len(targets), dtype=torch.bool) if fitted is None else fitted
    record: dict[str, Any] = {"examples": len(targets[held_out]), "fitted_on": int(rows.sum())}
    if int(rows.sum()) < FEW:
        few = f"{int(rows.sum())} examples are too few to fit a variance (at least {FEW})."
        return Calibration(), record | {"way": "none", "why": few}, None
    values = members.mean(1) if student is None else student
    folds = folds_of(targets, rows, seed)
    sigmas = {}
    for name, spread in {"residual": False, "variance": True}.items():
        sigma = torch.empty(values.shape, dtype=torch.float64)
        for judged in (*folds, (~rows).nonzero().flatten()):
            others = rows.clone()
            others[judged] = False
            fit = fit_variance(
                members[others], targets[others], values=values[others], spread=spread
            )
            sigma[judged] = fit(members[judged].double())
        sigmas[name] = sigma
    losses = {n: gaussian_nll(values, sigma, targets)[held_out] for n, sigma in sigmas.items()}
    best, why = choose(losses, VARIANCES, allowed=["variance"])
    best = "variance" if kind == "variance" else best
    record |= {
        "way": best,
        "folds": len(folds),
        "nll_by_way": {name: float(loss.mean()) for name, loss in losses.items()},
        "why": why,
    }
    variance = fit_variance(
        members[rows], targets[rows], values=values[rows], spread=best == "variance"
    )
    return Calibration(calibrator=variance), record, sigmas[best]


def choose(
    losses: Mapping[str, Tensor], titles: Mapping[str, str], *, allowed: Collection[str]
) -> tuple[str, str]:
    """Return the first way, or the best of those whose gain over it is clear; and why, in a line.

    Args:
        losses: NLL of each example by way, the simplest way first.
        titles: The ways in words.
        allowed: Ways that may be chosen.
    """
    (best, usual), *others = losses.items()
    title, gain, words = titles[best], 0.0, []
    for name, loss in others:
        mean, low, high = paired((loss - usual).tolist())
        words.append(
            f"{titles[name]} changes NLL by {mean:+.4f} (95 % interval {low:+.4f} to {high:+.4f})"
        )
        if name in allowed and high < 0 and mean < gain:
            best, gain = name, mean
    chosen = titles[best][0].upper() + titles[best][1:]
    return (
        best,
        f"{chosen}: on {len(usual)} examples out of fold, {'; '.join(words)} against {title}.",
    )


def supported(calibrators: Mapping[str, str], labels: Tensor, classes: int) -> list[str]:
    """Return the calibrators that the examples are enough for."""
    if len(labels) < LEAST:
        return []
    enough = len(labels) >= EACH * classes
    return [name for name in calibrators if enough or name == "isotonic"]


def cross_fitted_nll(member_logits: Tensor, labels: Tensor, *, seed: int = 0) -> Tensor:
    """Return every example's NLL under one temperature that was fitted without it, `[example]`."""
    folds = folds_of(labels, torch.ones(len(labels), dtype=torch.bool), seed)
    scaled = out_of_fold(member_logits, labels, folds, fit_mean)
    return nll_of(scaled, labels).double()


def fit_mean(member_logits: Tensor, labels: Tensor) -> Calibration:
    """Fit one temperature for all members."""
    mean = find_temperature(member_logits, labels).temperature
    return Calibration([1.0] * member_logits.shape[1], mean)


def fit_members_and_mean(member_logits: Tensor, labels: Tensor) -> Calibration:
    """Fit one temperature per member, then one for the mean of the scaled members."""
    each = [find_temperature(member, labels).temperature for member in member_logits.unbind(1)]
    scaled = scale_logits(member_logits, member_temperatures=each)
    return Calibration(each, find_temperature(scaled, labels).temperature)


def fit_more(
    member_logits: Tensor,
    labels: Tensor,
    *,
    base: Fit,
    fit: Callable[[Tensor, Tensor], Calibrator],
) -> Calibration:
    """Fit a calibrator on top of temperatures."""
    found = base(member_logits, labels)
    return found._replace(calibrator=fit(found(member_logits), labels))


def folds_of(labels: Tensor, fitted: Tensor, seed: int) -> list[Tensor]:
    """Return the fitted rows of each fold, stratified by label and seeded."""
    kind = labels if labels.ndim == 1 else labels.double().sum(1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(kind), generator=generator)
    shuffled = shuffled[fitted[shuffled]]
    order = shuffled[kind[shuffled].argsort(stable=True)]
    count = min(FOLDS, len(order))
    return [order[fold::count].sort().values for fold in range(count)]


def out_of_fold(logits: Tensor, labels: Tensor, folds: list[Tensor], fit: Fit) -> Tensor:
    """Return every example's logits under a calibration that was fitted without it."""
    scaled = logits.clone()
    if len(folds) < 2:
        return scaled
    fitted = torch.zeros(len(labels), dtype=torch.bool)
    fitted[torch.cat(folds)] = True
    never = (~fitted).nonzero().flatten()
    for rows in [*folds, never] if len(never) else folds:
        others = fitted.clone()
        others[rows] = False
        scaled[rows] = fit(logits[others], labels[others])(logits[rows]).to(scaled.dtype)
    return scaled


def _before_after(
    before: Tensor, after: Tensor, labels: Tensor, rows: Tensor
) -> dict[str, list[float]]:
    """Return NLL and ECE in %, each before and after."""
    found: dict[str, list[float]] = {"NLL": [], "ECE": []}
    for logits in (before[rows], after[rows]):
        found["NLL"].append(float(nll_of(logits, labels[rows]).double().mean()))
        if labels.ndim == 2:
            chances = logits.double().sigmoid().mean(1)
            figures = LabelFigures(chances, labels[rows], chances >= 0.5).figures(
                once(len(chances))
            )
            found["ECE"].append(100 * float(figures["cal/ECE"]))
            continue
        confidence, label = mean_probability(logits).max(-1)
        correct = label == labels[rows]
        found["ECE"].append(100 * float(expected_calibration_error(confidence, correct)))
    return found


def _refused(figures: dict[str, dict[str, list[float]]]) -> str:
    """Say why temperatures stay at 1."""

    def text(name: str, place: int) -> str:
        nll, ece = figures[name]["NLL"][place], figures[name]["ECE"][place]
        return f"NLL {nll:.4f}, ECE {ece:.1f} %"

    tried = "; ".join(f"{text(name, 1)} ({name})" for name in figures if name != "none")
    return (
        f"The temperatures stay at 1 ({text('none', 0)} on held-out examples): none that was tried "
        f"lowers the NLL without raising the ECE: {tried}."
    )
