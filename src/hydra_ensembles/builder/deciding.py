"""What is fitted on a finished ensemble: its temperatures and the score that it reports."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Chained
from ..data.running import collect_logits
from ..errors import DataError, UnsupportedModelError
from ..evaluation.metrics_ood import ood_figures
from ..fusion.ensemble import HydraEnsemble
from ..uncertainty import score_logits
from .calibrating import calibrate as fit_calibration
from .parts import Parts

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
        fitted = fit_calibration(
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
