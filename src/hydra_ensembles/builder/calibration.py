"""What `build` fits on a finished ensemble: temperatures, the score and novelty, in one pass.

It also checks whether the members' disagreement can serve as an alarm (`check_alarm`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
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
from ..evaluation.cross_fit import Calibration, calibration_of, cross_fit, fit_answer
from ..evaluation.evaluator import evaluate
from ..evaluation.metrics import ood_figures
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
from ..tasks import Regression, Task
from ..uncertainty import score_logits
from ..uncertainty.novelty_fit import NoveltyFit
from .data_parts import Parts

AUTO_SCORES = ("msp", "entropy", "max-logit", "energy", "mutual-information")


def calibrate_(
    ensemble: HydraEnsemble,
    host: nn.Module,
    parts: Parts,
    *,
    score: str,
    temperatures: bool | str,
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
        temperatures: Whether to fit a calibration; `"temperature"` fits only temperatures.
        novelty: Whether to fit novelty; None turns an error into a warning.
        seed: Seed of the folds.
        progress: Show a bar on a terminal.
    """
    task = ensemble.task
    outliers = parts.outliers("stop") if score == "auto" else {}
    fitting = parts.fitting() if temperatures and task.calibrators else []
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
        columns = torch.cat([logits[part] for part in fitting])
        targets = torch.cat([labels[part] for part in fitting])
        held_out = torch.cat(
            [torch.full((len(labels[p]),), p != "select", dtype=torch.bool) for p in fitting]
        )
        if isinstance(task, Regression):
            chosen, figures = fit_answer(task, columns, targets, held_out=held_out, seed=seed)
            found.update(chosen.to_dict(), figures=figures)
        else:
            plain = [
                collect_logits(
                    host, parts.data[part], name=f"host, {part}", progress=progress, task=task
                )[0]
                for part in fitting
            ]
            fitted, _ = cross_fit(
                columns,
                targets,
                torch.cat(plain).float(),
                held_out=held_out,
                calibrators={} if temperatures == "temperature" else task.calibrators,
                seed=seed,
            )
            found.update(fitted)
    if outliers:
        unknown = [collect_logits(ensemble, data)[0] for data in outliers.values()]
        found.update(_best_score(task, logits["stop"], unknown, found))
        if fitting and parts.given and task.classifies:
            found["traded"] = _traded(logits["stop"], unknown, found)
    ensemble.record["calibration"] = found
    if fit is not None:
        _finish_novelty_(ensemble, fit, parts, required=novelty is True)
    apply_calibration_(ensemble, found)
    ensemble.record["disagreement"] = check_alarm(ensemble, parts, seed=seed)


def check_alarm(ensemble: HydraEnsemble, parts: Parts, *, seed: int) -> dict[str, Any]:
    """Measure, on held-out data, whether disagreement separates outliers and proxies from it.

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
            sentence = f"Whether disagreement detects outliers is unknown: {error}"
            return {"auroc": {}, "useful": False, "sentence": sentence}
    results = evaluate(ensemble, data, ood=ood, bootstrap=0, progress=False, seed=seed)
    check: dict[str, Any] = results.settings["disagreement"]
    return check


def apply_calibration_(ensemble: HydraEnsemble, calibration: Mapping[str, Any]) -> None:
    """Set score, temperatures and calibrator, in place."""
    ensemble.score = calibration["score"]
    found = calibration_of(calibration)
    ensemble.temperature = found.temperature
    ensemble.member_temperatures = found.member_temperatures
    ensemble.calibrator = found.calibrator


def _traded(known: Tensor, outliers: list[Tensor], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return AUROC by MSP in percent before and after temperatures, mean over families."""
    auroc = []
    for calibrated in (Calibration(), calibration_of(found)):
        inside, *outside = (
            score_logits(calibrated(part.float()), "msp") for part in (known, *outliers)
        )
        values = [ood_figures(inside, other)["AUROC"] for other in outside]
        auroc.append(100 * float(sum(values) / len(values)))
    before, after = auroc
    nll, score = found["figures"]["ensemble"]["NLL"], found["score"]
    sentence = (
        f"The temperatures change NLL by {nll[1] - nll[0]:+.3f} and AUROC by MSP by "
        f"{after - before:+.1f} (held-out outliers)."
    )
    if score != "msp":
        sentence += f" By {score}, the score that is reported, AUROC is "
        sentence += f"{100 * found['auroc_by_score'][score] - before:+.1f} against MSP before them."
    return {"auroc": auroc, "sentence": sentence}


def _best_score(
    task: Task, known: Tensor, outliers: list[Tensor], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the score with the best mean AUROC over families of outliers."""
    members = known.shape[1]
    calibrated = calibration_of(found) if task.has_temperatures else Calibration()
    known, *others = (calibrated(logits) for logits in (known, *outliers))
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
