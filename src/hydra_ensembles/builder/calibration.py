"""Temperatures of a built ensemble: cross-fitted, reported on held-out data, never for the worse.

Every example is judged under temperatures that were fitted without it (five folds). Three ways
stand against each other out of fold, on held-out examples: no temperature, one for the mean, and
one per member with one for the mean. The one with the lowest NLL among those that raise neither NLL
nor ECE is fitted on all examples. What decides is what the record and its note show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..data.loaders import Chained
from ..data.model_runs import collect_logits
from ..errors import DataError, UnsupportedModelError
from ..evaluation.metrics import expected_calibration_error, negative_log_likelihood, ood_figures
from ..fusion.ensemble import HydraEnsemble
from ..uncertainty import find_temperature, mean_probability, scale_logits, score_logits
from .data_parts import Parts

FOLDS = 5
Temperatures = tuple[list[float], float]
"""One temperature per member, and one for the mean."""


def fit_temperatures(
    member_logits: Tensor,
    labels: Tensor,
    host_logits: Tensor,
    *,
    held_out: Tensor | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit the temperatures of an ensemble; return them with what they do, as plain data.

    See `cross_fit`.
    """
    return cross_fit(member_logits, labels, host_logits, held_out=held_out, seed=seed)[0]


def cross_fit(
    member_logits: Tensor,
    labels: Tensor,
    host_logits: Tensor,
    *,
    held_out: Tensor | None = None,
    fitted: Tensor | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Fit temperatures; return them as plain data, and all logits under temperatures not their own.

    Args:
        member_logits: Raw logits of the ensemble, `[example, member, class]`.
        labels: `[example]`.
        host_logits: Logits of the plain host on the same examples, `[example, 1, class]`.
        held_out: Which examples took no part in choosing members, `[example]`; all by default. They
            decide, and the figures are theirs.
        fitted: Which examples temperatures may be fitted on, `[example]`; all by default.
        seed: Of the folds.

    Returns:
        `temperature`, `member_temperatures` (1 where nothing is gained) and `calibration`: NLL and
        ECE (in %) of host and ensemble before and after, out of fold, the way that was chosen, and
        a note where temperatures were refused. And the ensemble's logits out of fold.
    """
    everything = torch.ones_like(labels, dtype=torch.bool)
    held_out = everything if held_out is None else held_out
    fitted = everything if fitted is None else fitted
    folds = _folds(labels, fitted, seed)
    members = member_logits.shape[1]
    judged = {"none": member_logits}
    unsupported = find_temperature(member_logits[fitted], labels[fitted]).note
    if not unsupported:
        judged["mean"] = _out_of_fold(member_logits, labels, folds, fit_mean)
        if members > 1:  # for one member both are the same
            way = "members and mean"
            judged[way] = _out_of_fold(member_logits, labels, folds, fit_members_and_mean)
    figures = {
        name: _before_after(member_logits, logits, labels, held_out)
        for name, logits in judged.items()
    }
    loss = {name: both["NLL"][1] for name, both in figures.items()}
    able = [name for name in judged if all(old >= new for old, new in figures[name].values())]
    best = min(able, key=lambda name: round(loss[name], 7))  # ties: the simplest
    each, mean = ([1.0] * members, 1.0)
    if best != "none":
        each, mean = _WAYS[best](member_logits[fitted], labels[fitted])
    scaled = _out_of_fold(host_logits, labels, folds, fit_mean)
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
    if best == "none":
        report["note"] = unsupported or _refused(figures)
    found = {"temperature": mean, "member_temperatures": each, "calibration": report}
    return found, judged[best]


def fit_mean(member_logits: Tensor, labels: Tensor) -> Temperatures:
    """Fit one temperature for all members."""
    mean = find_temperature(member_logits, labels).temperature
    return [1.0] * member_logits.shape[1], mean


def fit_members_and_mean(member_logits: Tensor, labels: Tensor) -> Temperatures:
    """Fit one temperature per member, then one for the mean of the scaled members."""
    each = [find_temperature(member, labels).temperature for member in member_logits.unbind(1)]
    scaled = scale_logits(member_logits, member_temperatures=each)
    return each, find_temperature(scaled, labels).temperature


_WAYS: dict[str, Callable[[Tensor, Tensor], Temperatures]] = {
    "mean": fit_mean,
    "members and mean": fit_members_and_mean,
}


def _folds(labels: Tensor, fitted: Tensor, seed: int) -> list[Tensor]:
    """Return the fitted rows of each fold, stratified by label and seeded."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    shuffled = shuffled[fitted[shuffled]]
    order = shuffled[labels[shuffled].argsort(stable=True)]
    count = min(FOLDS, len(order))
    return [order[fold::count].sort().values for fold in range(count)]


def _out_of_fold(
    logits: Tensor,
    labels: Tensor,
    folds: list[Tensor],
    fit: Callable[[Tensor, Tensor], Temperatures],
) -> Tensor:
    """Return every example's logits under temperatures that were fitted without it."""
    scaled = logits.clone()
    if len(folds) < 2:
        return scaled
    fitted = torch.zeros(len(labels), dtype=torch.bool)
    fitted[torch.cat(folds)] = True
    never = (~fitted).nonzero().flatten()
    for rows in [*folds, never] if len(never) else folds:
        others = fitted.clone()
        others[rows] = False
        each, mean = fit(logits[others], labels[others])
        scaled[rows] = scale_logits(logits[rows], temperature=mean, member_temperatures=each)
    return scaled


def _nll(logits: Tensor, labels: Tensor) -> float:
    return float(negative_log_likelihood(logits, labels).double().mean())


def _before_after(
    before: Tensor, after: Tensor, labels: Tensor, rows: Tensor
) -> dict[str, list[float]]:
    """Return NLL and ECE in %, each before and after."""
    found: dict[str, list[float]] = {"NLL": [], "ECE": []}
    for logits in (before[rows], after[rows]):
        confidence, label = mean_probability(logits).max(-1)
        correct = label == labels[rows]
        found["NLL"].append(_nll(logits, labels[rows]))
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


# What is fitted on a finished ensemble: its temperatures and the score that it reports.
AUTO_SCORES = ("msp", "entropy", "max-logit", "energy", "mutual-information")


def decide(
    ensemble: HydraEnsemble,
    host: nn.Module,
    parts: Parts,
    *,
    score: str,
    calibrate: bool,
    seed: int,
    progress: bool,
) -> dict[str, Any]:
    """Fit temperatures and choose the score; return plain data, change nothing."""
    decisions: dict[str, Any] = {
        "score": "msp" if score == "auto" else score,
        "temperature": None,
        "member_temperatures": None,
    }
    if calibrate:
        ours, theirs, labels, held_out = [], [], [], []
        for part in parts.fitting():
            data = parts.data[part]
            logits, target = collect_logits(
                ensemble, data, name=f"calibration, {part}", need_labels=True, progress=progress
            )
            assert target is not None  # need_labels
            ours.append(logits.float())
            theirs.append(collect_logits(host, data, name=f"host, {part}", progress=progress)[0])
            labels.append(target)
            held_out.append(torch.full_like(target, part != "select", dtype=torch.bool))
        fitted = fit_temperatures(
            torch.cat(ours),
            torch.cat(labels),
            torch.cat(theirs).float(),
            held_out=torch.cat(held_out),
            seed=seed,
        )
        decisions.update(fitted)
    if score == "auto":
        decisions.update(_auto_score(ensemble, parts, decisions))
    return decisions


def apply_decisions(ensemble: HydraEnsemble, decisions: dict[str, Any]) -> None:
    """Set score and temperatures."""
    ensemble.score = decisions["score"]
    ensemble.temperature = decisions["temperature"]
    ensemble.member_temperatures = decisions["member_temperatures"]


def _auto_score(ensemble: HydraEnsemble, parts: Parts, decisions: dict[str, Any]) -> dict[str, Any]:
    """Pick the score with the best mean AUROC over families, on the stopping part.

    Without outliers it is MSP, which tells wrong answers from right ones well.
    """
    if set(parts.sets["stop"]) == {"id"}:
        return {"score": "msp"}
    divide = torch.ones(ensemble.members)
    if decisions["member_temperatures"] is not None:
        divide = torch.tensor(decisions["member_temperatures"]) * decisions["temperature"]
    logits: dict[str, Tensor] = {
        name: collect_logits(ensemble, data)[0] / divide[:, None]
        for name, data in parts.sets["stop"].items()
    }
    names = [n for n in AUTO_SCORES if ensemble.members > 1 or n != "mutual-information"]
    found = {}
    for name in names:
        known = score_logits(logits["id"], name)
        values = [
            ood_figures(known, score_logits(v, name))["AUROC"]
            for k, v in logits.items()
            if k != "id"
        ]
        found[name] = sum(values) / len(values)
    best = max(names, key=lambda name: (round(found[name], 4), -names.index(name)))
    return {"score": best, "auroc_by_score": found}


def learn_known(ensemble: HydraEnsemble, parts: Parts, *, required: bool, progress: bool) -> None:
    """Fit novelty on all calibration data; `record["novelty"]` says what was done.

    Where that is impossible, `required` raises the error; else a warning and the record give it.
    """
    known = Chained(list(parts.data.values()))
    try:
        ensemble.fit_novelty_(known, progress=progress)
    except (DataError, UnsupportedModelError) as error:
        if required:
            raise
        ensemble.record["novelty"] = f"not fitted: {error}"
        warnings.warn(
            f"The ensemble is built without novelty: {error} Call ensemble.fit_novelty_(known) "
            "with other data, or pass novelty=False.",
            stacklevel=3,
        )
    else:
        ensemble.record["novelty"] = str(ensemble.novelty)
