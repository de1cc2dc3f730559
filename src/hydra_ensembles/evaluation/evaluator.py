"""Evaluate any classifier: accuracy, calibration, OOD detection, abstention, shifts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.class_names import check_class_order, first_spellings, model_names
from ..data.examples import is_one_set
from ..data.model_runs import collect_logits, run_model
from ..data.progress import expect, length_of
from ..errors import DataError, check_number
from ..hosts.host import check_model
from ..hosts.host_data import data_for
from ..tasks import task_of
from ..uncertainty import fit_temperature, scale_logits
from .disagreement_check import check_disagreement
from .figures import NOVELTY, OOD, POST, SHIFT, AllFigures, Columns, Examples, columns_of
from .intervals import default_draws, draws_of, intervals
from .results import Results


def evaluate(
    model: Any,
    data: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any] | Mapping[str, Iterable[Any]]] | Iterable[Any] | None = None,
    shifts: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    score: str | Sequence[str] | None = None,
    temperature: float | Iterable[Any] | None = None,
    bootstrap: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    name: str | None = None,
    seed: int = 0,
) -> Results:
    """Evaluate a model on labelled data, on out-of-distribution data and under shifts.

    Every data set is read once, in order; nothing grows with classes or members. It may be a stream
    without a length. Under `torchrun` or `accelerate launch` the processes share the batches: call
    it in all of them, with the whole data, and each gets the same results.

    Example:
        >>> results = evaluate(ensemble, test, ood={"textures": textures})
        >>> results["ood/textures/AUROC"], results.interval("cls/NLL")

    Args:
        model: anything that is called on a batch and answers with logits `[batch, class]` or
            `[batch, member, class]`, or an object or mapping with `.logits`; or that has
            `predict(batch) -> Prediction`.
        data: labelled batches, `(inputs, labels)` or mappings with `labels`.
        ood: out-of-distribution data by name; their labels are ignored. Groups of sets, such as
            `{"near": {"a": ...}, "far": {...}}`, add means `ood/near/mean/...`.
        shifts: labelled data under shift (corruptions, other years) by name.
        score: name of the uncertainty that ranks errors and OOD examples, or several: the first is
            the main one, others add `ood/<set>/<score>/...`; by default the task's usual one, of
            classes `msp`. `mcm` needs the model's `logit_scale`, `neglabel` a `ZeroShotClassifier`
            with `negatives`.
            `novelty` needs `fit_novelty_`, and is added where it is fitted.
        temperature: adds `post/...` figures after dividing logits by it: a number, or labelled
            held-out batches to fit it on (never the test data).
        bootstrap: number of draws for 95 % intervals over test examples; 0 for none. By default
            1,000, or fewer (200 at least) where the data is large; `settings` has the number.
        device: where inputs go; by default the model's own.
        progress: show bars on a terminal.
        name: of the model, in tables and errors.
        seed: of the draws.

    Returns:
        Figures by torch-uncertainty's names, see `Results`.

    Raises:
        DataError: naming the data set, for NaN logits, labels out of range or missing, empty data,
            inputs that the model refuses, and classes that differ between sets; and for class
            names in an assumed order that is not the model's (`check_class_order`).
    """
    if not callable(model) and not callable(getattr(model, "predict", None)):
        check_model(model)
    check_number("bootstrap", bootstrap, least=0, whole=True, optional=True)
    task = task_of(model)
    score = task.default_score if score is None else score
    names = [score] if isinstance(score, str) else list(score)
    for each in names:
        if each != NOVELTY:
            task.scores[each]  # an unknown name fails before hours of work, not after
    scale = logit_scale_of(model) if "mcm" in names else None
    divided_by = divisor_of(model)
    given = {"id": data, **_named(ood, OOD), **_named(shifts, SHIFT)}
    sets = {
        key: data_for(model, batches, name=key, labels=not key.startswith(OOD), once=True)
        for key, batches in given.items()
    }
    check_class_order(model, sets["id"], seed=seed)
    degrees = _temperature(model, temperature, device=device, progress=progress)
    spelled = first_spellings(model_names(model) or [])
    tags = spelled if task.by_token else []

    counts = [length_of(batches) for batches in sets.values()]
    known = sum(n for n in counts if n is not None) if None not in counts else 0
    start = time.perf_counter()
    examples: Examples = {}
    shape: tuple[int, int] | None = None
    for key, batches in sets.items():
        parts: list[Columns] = []
        scaled: list[Columns] = []
        for run in run_model(
            model,
            batches,
            name=key,
            need_labels=not key.startswith(OOD),
            ignore_labels=key.startswith(OOD),
            device=device,
            progress=progress,
            classes=shape[1] if shape and not task.ragged else None,
        ):
            if shape is None:
                expect("evaluating", (time.perf_counter() - start) * known, enabled=progress)
            shape = shape or (run.logits.shape[1], run.logits.shape[2])
            if NOVELTY in names and run.novelty_score is None:
                raise DataError(
                    "The score 'novelty' needs fitted novelty, but the model's predictions have "
                    "none: call ensemble.fit_novelty_(known) first."
                )
            if NOVELTY not in names and run.novelty_score is not None:
                names = [*names, NOVELTY]
            columns = columns_of(
                run, scores=names, logit_scale=scale, temperature=divided_by, task=task, names=tags
            )
            parts.append(columns)
            if degrees is not None:
                cooled = scale_logits(run.answering_logits.double(), temperature=degrees)
                # MCM reads cosines: what divides the logits divides their scale
                by = None if scale is None else scale / degrees
                # the sets and decisions are about the logits
                after = run._replace(code=None, covered=None, set_size=None)
                if run.student_logits is None:
                    after = after._replace(logits=cooled)
                else:
                    after = after._replace(student_logits=cooled[:, 0])
                columns = columns_of(
                    after,
                    scores=names,
                    logit_scale=by,
                    temperature=divided_by * degrees,
                    task=task,
                )
                scaled.append(columns)
        examples[key] = _concatenate(parts)
        if scaled:
            examples[POST + key] = _concatenate(scaled)

    assert shape is not None  # run_model raises on empty data
    settings = {
        "scores": names,
        "members": shape[0],
        "classes": shape[1],
        "examples": {key: len(examples[key][f"score:{names[0]}"]) for key in sets},
        "temperature": degrees,
        "bootstrap": bootstrap,
        "seed": seed,
    }
    rule = getattr(model, "sets", None)
    if rule is not None:
        about = {"asked": rule.coverage, "method": rule.method, "by": rule.by}
        settings["sets"] = about | {"classes": spelled}
    return results_of(
        examples, name=name or type(model).__name__, settings=settings, progress=progress
    )


def results_of(
    examples: Examples, *, name: str, settings: dict[str, Any], progress: bool = False
) -> Results:
    """Turn columns of examples into results: figures, notes on missing ones, intervals."""
    figures = AllFigures(examples, scores=settings["scores"])
    if settings["bootstrap"] is None:
        settings["bootstrap"] = default_draws(figures.sizes, settings["scores"])
    notes = {}
    values = figures.plain()
    if "fail/AUROC" not in values and "correct" in examples["id"]:  # else nothing is wrong
        right = "every" if bool(examples["id"]["correct"].all()) else "no"
        reason = f"{right} prediction is right, so errors cannot be ranked."
        notes = {f"fail/{key}": reason for key in ("AUROC", "AUPR", "FPR95")}
    check = check_disagreement(
        examples, members=settings["members"], score=settings["scores"][0], seed=settings["seed"]
    )
    if check is not None:
        settings["disagreement"] = check
    found = Results(name=name, figures=values, settings=settings, notes=notes, examples=examples)
    count, seed = settings["bootstrap"], settings["seed"]
    if count:
        draws = draws_of(found, tuple(examples), count, seed, progress=progress)
        found.intervals.update(intervals(values, draws))
    return found


def logit_scale_of(model: Any) -> Tensor:
    """Return what multiplies the cosines in a zero-shot model's logits, a scalar or `[member, 1]`.

    Its number or buffer `logit_scale` (a parameter of that name, CLIP's own, is a logarithm and is
    not read), less the temperatures by which an ensemble has divided its logits.
    """
    held = getattr(model, "logit_scale", None)
    if not isinstance(held, (int, float)):
        buffers = model.named_buffers() if isinstance(model, nn.Module) else ()
        found = (buffer for key, buffer in buffers if key.rsplit(".", 1)[-1] == "logit_scale")
        held = next(found, None)
    if held is not None:
        return torch.as_tensor(held, dtype=torch.float64, device="cpu") / divisor_of(model)
    raise DataError(
        f"The score 'mcm' reads cosines, but {type(model).__name__} has no logit_scale to divide "
        "its logits by. Evaluate a ZeroShotClassifier, or set model.logit_scale (1.0 for cosines)."
    )


def divisor_of(model: Any) -> Tensor:
    """Return what an ensemble has divided its answering logits by, a scalar or `[member, 1]`."""
    divisor = torch.ones((), dtype=torch.float64)
    names = ["temperature", "member_temperatures"]
    for name in names[: 1 if getattr(model, "student", None) is not None else 2]:
        degrees = getattr(model, name, None)
        if isinstance(degrees, (int, float, list, tuple, Tensor)):
            by = torch.as_tensor(degrees, dtype=torch.float64, device="cpu")
            divisor = divisor * (by[:, None] if by.ndim else by)
    return divisor


def _named(data: Mapping[str, Any] | Iterable[Any] | None, kind: str) -> dict[str, Iterable[Any]]:
    """Name every set `<kind><name>`, in a group `<kind><group>/<name>`; else like its kind."""
    if data is None:
        return {}
    if not isinstance(data, Mapping) or is_one_set(data):
        data = {kind.rstrip("/"): data}
    if "mean" in data:
        raise DataError(
            f"A data set cannot be called 'mean': {kind}mean/... is the mean over sets."
        )
    named: dict[str, Iterable[Any]] = {}
    for key, batches in data.items():
        named |= (
            _named(batches, f"{kind}{key}/")
            if isinstance(batches, Mapping) and not is_one_set(batches)
            else {kind + str(key): batches}
        )
    return named


def _temperature(
    model: Any, given: float | Iterable[Any] | None, *, device: Any, progress: bool
) -> float | None:
    if given is None or isinstance(given, (int, float)):
        return None if given is None else float(given)
    held_out = data_for(model, given, name="temperature", once=True)
    logits, labels = collect_logits(
        model, held_out, name="temperature", need_labels=True, device=device, progress=progress
    )
    assert labels is not None  # need_labels
    return fit_temperature(logits, labels)


def _concatenate(parts: list[Columns]) -> Columns:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
