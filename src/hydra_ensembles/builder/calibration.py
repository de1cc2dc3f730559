"""What `build` fits on a finished ensemble: temperatures, the score and novelty, in one pass.

It also checks whether the members' disagreement can serve as an alarm (`check_alarm`).

Temperatures are cross-fitted: every example is judged under temperatures that were fitted without
it (five folds). Three ways compete out of fold, on held-out examples: no temperature, one for the
mean, and one per member with one for the mean. Among those that raise neither NLL nor ECE, the one
with the lowest NLL is fitted on all examples. The record and its note show the deciding figures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import split_batch
from ..data.eval_mode import in_eval
from ..data.input_facts import described
from ..data.loaders import Batches
from ..data.memory import Halving
from ..data.model_runs import collect_logits
from ..data.padding import joined_rows
from ..data.processes import in_order
from ..data.progress import progress_bar
from ..data.proxies import make_proxies
from ..errors import DataError
from ..evaluation.evaluator import evaluate
from ..evaluation.metrics import expected_calibration_error, negative_log_likelihood, ood_figures
from ..fusion.ensemble import HydraEnsemble
from ..fusion.known_data import (
    add_outliers_,
    columns_of,
    features_of,
    finished,
    novelty_fit,
    novelty_rows,
    proxies_of,
    scale_of,
)
from ..tasks import Task
from ..uncertainty import find_temperature, mean_probability, scale_logits, score_logits
from ..uncertainty.novelty_fit import NoveltyFit
from .data_parts import Parts

FOLDS = 5
Temperatures = tuple[list[float], float]
"""One temperature per member, and one for the mean."""


def cross_fit(
    member_logits: Tensor,
    labels: Tensor,
    host_logits: Tensor,
    *,
    held_out: Tensor | None = None,
    fitted: Tensor | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Fit temperatures; return them as plain data, and all logits scaled out of fold.

    Args:
        member_logits: Raw logits of the ensemble, `[example, member, class]`.
        labels: `[example]`.
        host_logits: Logits of the plain host on the same examples, `[example, 1, class]`.
        held_out: Which examples took no part in choosing members, `[example]`; all by default. They
            decide, and the figures are theirs.
        fitted: Which examples temperatures may be fitted on, `[example]`; all by default.
        seed: Seed of the folds.

    Returns:
        `temperature`, `member_temperatures` (1 where nothing is gained) and `figures`: NLL and ECE
        (in %) of host and ensemble before and after, out of fold, the way that was chosen, and a
        note where temperatures were refused. And the ensemble's logits out of fold.
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
    each, mean = [1.0] * members, 1.0
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
    return {"temperature": mean, "member_temperatures": each, "figures": report}, judged[best]


def cross_fitted_nll(member_logits: Tensor, labels: Tensor, *, seed: int = 0) -> Tensor:
    """Return every example's NLL under one temperature that was fitted without it, `[example]`."""
    folds = _folds(labels, torch.ones_like(labels, dtype=torch.bool), seed)
    scaled = _out_of_fold(member_logits, labels, folds, fit_mean)
    return negative_log_likelihood(scaled, labels).double()


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


def _before_after(
    before: Tensor, after: Tensor, labels: Tensor, rows: Tensor
) -> dict[str, list[float]]:
    """Return NLL and ECE in %, each before and after."""
    found: dict[str, list[float]] = {"NLL": [], "ECE": []}
    for logits in (before[rows], after[rows]):
        confidence, label = mean_probability(logits).max(-1)
        correct = label == labels[rows]
        found["NLL"].append(float(negative_log_likelihood(logits, labels[rows]).double().mean()))
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


# What is fitted on a finished ensemble: temperatures, the score that it reports, and novelty.
AUTO_SCORES = ("msp", "entropy", "max-logit", "energy", "mutual-information")


def calibrate_(
    ensemble: HydraEnsemble,
    host: nn.Module,
    parts: Parts,
    *,
    score: str,
    temperatures: bool,
    novelty: bool | None,
    seed: int,
    progress: bool,
) -> None:
    """Fit temperatures, the score and novelty in place; the ensemble runs over the data once.

    `record["calibration"]` and `record["novelty"]` say what was done.

    Args:
        ensemble: A fused ensemble.
        host: The plain host, whose figures are reported beside those of the ensemble.
        parts: The data.
        score: The uncertainty to report; `"auto"` chooses it by outliers.
        temperatures: Whether to fit temperatures.
        novelty: Whether to fit novelty; None turns an error into a warning.
        seed: Seed of the folds.
        progress: Show a bar on a terminal.
    """
    task = ensemble.task
    outliers = parts.outliers("stop") if score == "auto" else {}
    fitting = parts.fitting() if temperatures and task.classifies else []
    fit: NoveltyFit | None = None
    logits: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    for part, data in parts.data.items():
        if novelty is False and part not in fitting and not (outliers and part == "stop"):
            continue
        batches = []
        for batch in run_ensemble(ensemble, data, name=f"calibration, {part}", progress=progress):
            batches.append((batch["logits"], batch["labels"]))
            if novelty is not False:
                if fit is None:
                    rows = batch.get("rows")
                    fit = novelty_fit(ensemble, 0 if rows is None else rows.shape[-1])
                fit.add_(batch["summaries"], batch.get("rows"), batch.get("classes"))
                fit.add_columns_(batch)
        if fit is not None:
            fit.add_columns_(described(data))
        logits[part] = joined_rows([outputs for outputs, _ in batches])
        labels[part] = torch.cat([given for _, given in batches])
    found: dict[str, Any] = {
        "score": task.default_score if score == "auto" else score,
        "temperature": None,
        "member_temperatures": None,
    }
    if fitting:
        plain = [
            collect_logits(host, parts.data[part], name=f"host, {part}", progress=progress)[0]
            for part in fitting
        ]
        held_out = [torch.full_like(labels[p], p != "select", dtype=torch.bool) for p in fitting]
        fitted, _ = cross_fit(
            torch.cat([logits[part] for part in fitting]),
            torch.cat([labels[part] for part in fitting]),
            torch.cat(plain).float(),
            held_out=torch.cat(held_out),
            seed=seed,
        )
        found.update(fitted)
    if outliers:
        unknown = [collect_logits(ensemble, data)[0] for data in outliers.values()]
        found.update(_best_score(task, logits["stop"], unknown, found))
        if fitting and parts.given:
            found["traded"] = _traded(logits["stop"], unknown, found)
    ensemble.record["calibration"] = found
    if fit is not None:
        _finish_novelty_(ensemble, fit, parts, required=novelty is True)
    apply_calibration_(ensemble, found)
    ensemble.record["disagreement"] = check_alarm(ensemble, parts, seed=seed)


def check_alarm(ensemble: HydraEnsemble, parts: Parts, *, seed: int) -> dict[str, Any]:
    """Measure, on held-out data, whether disagreement tells outliers and proxies from known data.

    Every kind of proxy is made of its own share of the examples, so that the check costs two passes
    over the held-out part.
    """
    if len(ensemble.plan.ends) == 1:
        words = "Members cannot disagree here" if ensemble.members > 1 else "There is one member"
        sentence = f"{words}: mutual information and disagreement are 0 and raise no alarm."
        return {"auroc": {}, "useful": False, "sentence": sentence}
    data = parts.data["temperature"]
    ood: dict[str, Any] = {"outliers": given} if (given := parts.given) else {}
    try:
        kinds = list(make_proxies(data, "auto", seed=seed))
        shares = {kind: range(place, data.count, len(kinds)) for place, kind in enumerate(kinds)}
        ood["proxies"] = {
            kind: make_proxies(data.subset(rows), kind, seed=seed)[kind]
            for kind, rows in shares.items()
            if rows
        }
    except DataError as error:  # neither images nor token ids
        if not ood:
            sentence = f"Whether disagreement tells outliers is not known: {error}"
            return {"auroc": {}, "useful": False, "sentence": sentence}
    results = evaluate(ensemble, data, ood=ood, bootstrap=0, progress=False, seed=seed)
    check: dict[str, Any] = results.settings["disagreement"]
    return check


def apply_calibration_(ensemble: HydraEnsemble, calibration: Mapping[str, Any]) -> None:
    """Set score and temperatures, in place."""
    ensemble.score = calibration["score"]
    ensemble.temperature = calibration["temperature"]
    ensemble.member_temperatures = calibration["member_temperatures"]


def _traded(known: Tensor, outliers: list[Tensor], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return AUROC by MSP in percent before and after temperatures, mean over families."""
    scaled = [{}, {key: found[key] for key in ("temperature", "member_temperatures")}]
    auroc = []
    for options in scaled:
        inside, *outside = (
            score_logits(scale_logits(part.float(), **options), "msp")
            for part in (known, *outliers)
        )
        values = [ood_figures(inside, other)["AUROC"] for other in outside]
        auroc.append(100 * float(sum(values) / len(values)))
    before, after = auroc
    nll = found["figures"]["ensemble"]["NLL"]
    return {
        "auroc": auroc,
        "sentence": f"The temperatures change NLL by {nll[1] - nll[0]:+.3f} and AUROC by MSP by "
        f"{after - before:+.1f} (held-out outliers).",
    }


def _best_score(
    task: Task, known: Tensor, outliers: list[Tensor], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the score with the best mean AUROC over families of outliers."""
    members = known.shape[1]
    divide = torch.ones(members)
    if found["member_temperatures"] is not None:
        divide = torch.tensor(found["member_temperatures"]) * found["temperature"]
    known, *others = (
        logits / divide.reshape(-1, *[1] * (logits.ndim - 2)) for logits in (known, *outliers)
    )
    names = [n for n in AUTO_SCORES if members > 1 or n != "mutual-information"]
    names = [name for name in names if name in task.scores] or [task.default_score]
    auroc = {}
    for name in names:
        inliers = task.score(known, name)
        values = [ood_figures(inliers, task.score(other, name))["AUROC"] for other in others]
        auroc[name] = sum(values) / len(values)
    best = max(names, key=lambda name: (round(auroc[name], 4), -names.index(name)))
    return {"score": best, "auroc_by_score": auroc}


def _finish_novelty_(
    ensemble: HydraEnsemble, fit: NoveltyFit, parts: Parts, *, required: bool
) -> None:
    """Set an ensemble's novelty; where that is impossible, `required` raises, else it warns.

    A choice of terms may lose neither proxies nor the outliers that were given.
    """
    known = parts.data["temperature"]

    def add_far() -> None:
        add_outliers_(ensemble, fit, parts.given)
        add_outliers_(ensemble, fit, proxies_of(known))

    try:
        ensemble.novelty = finished(ensemble, fit, known, add_proxies=add_far)
    except DataError as error:
        if required:
            raise
        ensemble.record["novelty"] = f"not fitted: {error}"
        warnings.warn(
            f"The ensemble is built without novelty: {error} Call ensemble.fit_novelty_(known) "
            "with other data, or pass novelty=False.",
            stacklevel=4,
        )
        return
    ensemble.record["novelty"] = str(ensemble.novelty)


@torch.no_grad()
def run_ensemble(
    ensemble: HydraEnsemble, data: Batches, *, name: str, progress: bool
) -> Iterator[dict[str, Tensor]]:
    """Run an ensemble over data once; yield its raw logits and what novelty reads, by batch.

    `logits` and `labels` are by example (every token of a token classifier is one). By input are
    `summaries` and, where there are any, `rows` of logits for novelty, `classes`, and what novelty
    keeps of inputs (`columns_of`).
    """
    model, task = in_eval(ensemble), ensemble.task
    halving, scale = Halving(name), scale_of(ensemble, data)

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        columns: dict[str, list[Tensor]] = {}
        for part, (said, summaries) in halving(partial(features_of, model), batch):
            _, inputs, given = split_batch(part)
            logits, labels = task.examples(said.cpu(), given, inputs)
            if not bool(logits.amax(-1).isfinite().all()):
                raise DataError(
                    f"The model returned NaN or infinity for batch {index} of the data set "
                    f"{name!r}. Check the inputs (scale, missing values) and the model's precision."
                )
            found = {
                "logits": logits,
                "labels": None if labels is None else task.check_labels(labels, name),
                "summaries": summaries.float().cpu(),
                "rows": novelty_rows(ensemble, said.cpu(), part),
                "classes": given if task.classifies and said.ndim == 3 else None,
                **columns_of(ensemble, part, scale),
            }
            for key, value in found.items():
                if value is not None:
                    columns.setdefault(key, []).append(value)
        return {key: torch.cat(values) for key, values in columns.items()}

    results = in_order(data, work, name=name)
    yield from progress_bar(results, description=name, enabled=progress, total=len(data))
