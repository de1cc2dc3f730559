"""`method="auto"`: heads, parts or one member, by the NLL on data that chose nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..data.batches import without_labels
from ..data.model_runs import collect_logits
from ..data.progress import announce
from ..errors import DataError, MaskError, UnsupportedModelError
from ..evaluation.cross_fit import cross_fitted_nll
from ..evaluation.intervals import student
from ..fusion.fuse_members import fuse
from ..heads.head_mask import HeadMask
from ..search.detection import compare_detection
from ..tasks import Task
from .data_parts import BuildJob, Outcome
from .methods import METHODS, Select
from .refit_methods import Parts

NAMES = {"select": "heads (select)", "parts": "parts", "one": "one member"}


@METHODS.register("auto")
@dataclass(frozen=True)
class Auto:
    """Take heads, parts or one member, whichever has the lowest NLL on held-out data (the default).

    The NLL is that at one temperature, cross-fitted on the part of the data that selected nothing.
    Heads are taken unless another is better by more than the paired 95 % interval. A number of
    members that the caller gives is obeyed.
    """

    name: ClassVar[str] = "auto"
    members: ClassVar[int | None] = None
    proxies: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"select": Select().settings(), "parts": Parts().settings()}

    def find(self, job: BuildJob) -> Outcome:
        """Find members in each way, and keep the best."""
        outcomes, refused = _candidates(job)
        known = job.state.find("auto")
        decision: dict[str, Any]
        if known:
            decision = known[0]
        else:
            unsafe = _unsafe_parts(job, outcomes)
            safe = {name: one for name, one in outcomes.items() if name not in unsafe}
            decision = _decide(job, safe, {**refused, **unsafe})
        if not known:
            job.state.add({"auto": decision})
        announce(decision["why"], enabled=job.progress)
        chosen = outcomes[decision["chosen"]]
        return Outcome({**chosen.record, "auto": decision}, chosen.ensemble)


def _candidates(job: BuildJob) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Return what each way found, heads first, and why others are not possible."""
    first = without_labels(job.parts.data["select"].batch(0))

    def fused(record: dict[str, Any]) -> Outcome:
        masks = [HeadMask(rows) for rows in record["masks"]]
        return Outcome(record, fuse(job.host.model, masks, batch=first, task=job.host.task))

    known = job.state.find("heads")
    outcomes: dict[str, Outcome] = {}
    refused: dict[str, str] = {}
    heads: dict[str, Any] = {}
    try:
        heads = known[0] if known else Select().find(job).record
    except MaskError as error:  # their members cost too much: readers of all tokens
        if job.asked:
            raise
        refused["select"] = str(error)
    else:
        if not known:
            job.state.add({"heads": heads})
        outcomes["select"] = fused(heads)
    if job.members > 1:
        members = job.members if job.asked else Parts.members
        assert members is not None
        try:
            outcomes["parts"] = found = Parts().find(replace(job, members=members))
            assert found.ensemble is not None
            found.ensemble.task = job.host.task
        except (UnsupportedModelError, DataError, MaskError) as error:
            refused["parts"] = str(error)
    whole = [HeadMask.full(job.host)]
    if heads.get("detection", {}).get("heads") == "host":  # one member, as given
        return outcomes, refused
    if (not job.asked or job.members == 1) and job.budget.allows(whole):
        cost = job.budget.ratio(whole)
        outcomes["one"] = fused({"masks": [whole[0].tolist()], "cost": cost, "branch_layers": []})
    if not outcomes:
        raise MaskError(refused["select"])
    return outcomes, refused


def _unsafe_parts(job: BuildJob, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Say why parts are refused if they may lose detection by MSP; they see no outliers at all."""
    if "parts" not in outcomes or not job.parts.given or not job.host.task.classifies:
        return {}
    sets: dict[str, list[Any]] = {}
    for part in ("select", "stop"):
        for name, data in job.parts.outliers(part).items():
            sets.setdefault(name, []).append(data)
    sets |= {f"proxy/{name}": [data] for name, data in job.parts.judging().items()}

    def logits(model: nn.Module, data: Sequence[Any]) -> Tensor:
        return torch.cat([collect_logits(model, one)[0].float() for one in data])

    ensemble = outcomes["parts"].ensemble
    assert ensemble is not None
    models = (ensemble, job.host.model)
    mine, host = (logits(model, [job.parts.data["stop"]]) for model in models)
    cases = {
        name: (mine, logits(ensemble, data), host, logits(job.host.model, data))
        for name, data in sets.items()
    }
    detection = compare_detection(cases, seed=job.seed)
    if detection.kept:
        return {}
    return {"parts": f"Parts may lose detection: {detection.sentence}"}


def held_out_losses(task: Task, outputs: Tensor, labels: Tensor, *, seed: int) -> Tensor:
    """Return every example's loss: NLL at a cross-fitted temperature, or the task's own."""
    if task.classifies:
        return cross_fitted_nll(outputs, labels, seed=seed)
    return task.losses(task.mean(outputs), labels).double()


def _decide(
    job: BuildJob, outcomes: Mapping[str, Outcome], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Choose by the NLL on held-out examples; say why."""
    data = job.parts.data["temperature"]
    losses: dict[str, Tensor] = {}
    for name, outcome in outcomes.items():
        logits, labels = collect_logits(
            outcome.ensemble, data, name=f"auto, {name}", need_labels=True, progress=job.progress
        )
        assert labels is not None
        losses[name] = held_out_losses(job.host.task, logits.float(), labels, seed=job.seed)
    nll = {name: float(loss.mean()) for name, loss in losses.items()}
    best = min(nll, key=lambda name: round(nll[name], 7))  # ties: the first, heads
    classes = job.host.task.classifies
    short, measure = ("NLL", "NLL at one temperature") if classes else ("loss", "Loss")
    first = next(iter(losses))
    chosen, reason, difference = best, f"their {short} is the lowest", None
    if len(losses) == 1:
        reason = "no other candidate is left"
    elif best != first:
        difference = student((losses[first] - losses[best]).tolist())
        if difference.low <= 0:
            chosen = first
            reason = f"{NAMES[best]} has a lower {short}, but not by more than the interval"
        else:
            reason = (
                f"its {short} is lower than that of {NAMES[first].split(' (')[0]} by {difference}"
            )
    names = dict(NAMES)
    if (
        "select" in outcomes
        and outcomes["select"].record.get("detection", {}).get("heads") == "host"
    ):
        names["select"] = "the host's own heads"
    figures = ", ".join(f"{names[name]} {value:.4f}" for name, value in nll.items())
    why = (
        f"Took {names[chosen]}: {reason}. {measure} on {len(losses[first])} "
        f"held-out examples: {figures}."
    )
    for error in refused.values():
        why += f" {error.split('. ')[0].rstrip('.')}."
    return {
        "chosen": chosen,
        "why": why,
        "nll": nll,
        "examples": len(losses[first]),
        "difference": None if difference is None else list(difference),
        "refused": dict(refused),
    }
