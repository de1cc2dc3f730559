"""`build` and `replay`: find members, fuse them, calibrate the ensemble; everything is recorded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from .._tensors import model_fingerprint
from ..costs.budget import Budget
from ..data import processes
from ..data.batches import check_inputs
from ..data.class_names import check_class_order
from ..data.eval_mode import evaluating
from ..data.memory import in_plain_words
from ..data.model_runs import call_model, check_data
from ..data.progress import announce
from ..errors import DataError, UnsupportedModelError, check_number
from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse
from ..fusion.inputs import remember_inputs
from ..heads.head_mask import HeadMask
from ..hosts import HostModel, host_model
from ..hosts.example_inputs import pad_token
from ..hosts.host_data import data_for
from ..search.search_state import SearchState, TensorStore
from ..tasks import Embedding, MultiClass, Task, refuse, task_of
from .calibration import apply_calibration_, calibrate_
from .data_parts import BuildJob, Outcome, Parts
from .methods import Method, as_method

DEFAULT_MEMBERS = 3


@in_plain_words()
@processes.holds("folder")
def build(
    model: nn.Module | HostModel,
    calibration: Any,
    *,
    ood: Any = "auto",
    validation: Any = None,
    method: str | Method = "auto",
    members: int | None = None,
    max_cost: float | None = 1.07,
    score: str = "auto",
    calibrate: bool | Literal["temperature"] = True,
    novelty: bool | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    task: str | Task | None = None,
) -> HydraEnsemble:
    """Build an ensemble from a pretrained model; nothing is trained.

    Under `torchrun` or `accelerate launch` the processes share the batches: call it in all of them,
    and each gets the same members.

    Args:
        model: A host model with a classifier; it is not changed.
        calibration: Labelled in-distribution data that the model was not trained on; some hundred
            examples. It is split (stratified, seeded): 60 % select members, 20 % decide between the
            best, 20 % are held out. Temperatures are cross-fitted over all of it; their figures are
            those of the 40 % that did not select.
        ood: Outliers: data, a dict of data by family, or `"auto"` (or None) for none. The method
            `circuit` adds proxies made from the calibration data.
        validation: Labelled data that decides and fits temperatures instead of the split.
        method: `"auto"` (heads by `select`, parts, or the model as one member, whichever has the
            lowest NLL on held-out data), `"select"` (heads by the ensemble's own figures, in a few
            passes over the data), `"parts"` (shares of the last block's neurons, refitted),
            `"circuit"` (HeadMap with one objective per member, as in the paper), `"taylor"`,
            `"hies"` or `"random"`; or a config object of `hydra_ensembles.methods` with the
            method's own options, such as `Select(masks=96)` or `Circuits(keep=0.5)`.
        members: Number of members M; by default 3, for parts 5, and `"auto"` may also choose one.
            They differ; where that is impossible, the summary and `record["equal_members"]` say
            why.
        max_cost: Bound on counted multiply-adds relative to the plain model; None for none.
        score: The uncertainty that `predict` reports, or `"auto"`: the best on held-out outliers,
            without any the task's usual one (of classes `"msp"`).
        calibrate: Fit a temperature per member and one for the mean, if that lowers NLL out of
            fold; else they are 1 and the record says so. Where its gain is clear (paired interval),
            a calibrator follows: vector scaling or isotonic regression of classes, Platt scaling of
            labels; numbers get a variance (`fit_calibrator`). `"temperature"` fits only those.
        novelty: Fit novelty on the calibration data (`fit_novelty_`). By default where that is
            possible: otherwise a warning and the summary say why not. True raises instead.
        seed: Random seed of splits, proxies, pools and bags.
        folder: Keep finished steps here (candidates' logits, up to 1 GB, until the search is done),
            so that a stopped build resumes and ends with the same members. Another model, other
            data or settings are refused.
        progress: Report progress: a bar on a terminal, else a log line every ten seconds.
        task: What the outputs mean, where the model's class and config do not say it (see `fuse`).

    Returns:
        The ensemble, in eval mode; `.record` says what was done and can be given to `replay`.

    Example:
        >>> ensemble = build(model, calibration, ood={"textures": textures})
        >>> ensemble.predict(batch).uncertainty
    """
    way = as_method(method)
    check_number("members", members, least=1, whole=True, optional=True)
    check_number("max_cost", max_cost, above=0, optional=True)
    check_number("seed", seed, whole=True)
    if isinstance(model, HydraEnsemble):
        raise UnsupportedModelError(
            f"This is an ensemble of {model.members} members already. Give the host model that it "
            "was built from, or ensemble.member(0)."
        )
    refuse(model.model if isinstance(model, HostModel) else model)
    host = host_model(model)
    host.task = task_of(host.model, task)
    if score != "auto":
        host.task.scores[score]  # an unknown name fails now
    check_labelled(host.task)
    calibration = data_for(host, calibration, name="calibration")
    if validation is not None:
        validation = data_for(host, validation, name="validation")
    labels = getattr(calibration, "labels", None)  # known before an input is loaded
    size = getattr(host.model, "num_labels", getattr(host.model, "num_classes", None))
    if isinstance(size, int) and labels is not None and type(host.task) is MultiClass:
        host.task.check_labels(labels, "the calibration data", size=size)
    check_data(host.model, calibration)
    check_class_order(host.model, calibration, seed=seed)
    parts = Parts(
        host,
        calibration,
        validation,
        ood,
        seed,
        proxies=way.proxies,
        pad_id=pad_token(host.model),
        progress=progress,
    )
    first = parts.data["select"].batch(0)
    classes, seconds = _try(host, first)
    settings: dict[str, Any] = {
        "method": way.name,
        "options": way.settings(),
        "members": way.members if members is None else members,
        "max_cost": max_cost,
        "score": score,
        "calibrate": calibrate,
        "seed": seed,
        "model": model_fingerprint(host.model),
        "data": processes.on_first(lambda: parts.fingerprints(classes, host.task)),
    }
    settings = json.loads(json.dumps(settings))
    state = SearchState(folder, settings, name="build.json")
    store = None if folder is None else TensorStore(Path(folder) / "candidates")
    found = next((Outcome(step) for step in state.steps if "masks" in step), None)
    if found is None:
        work = BuildJob(
            host=host,
            parts=parts,
            members=settings["members"] or DEFAULT_MEMBERS,
            asked=members is not None,
            budget=Budget.of(host, first, max_cost),
            seed=seed,
            state=state,
            store=store,
            progress=progress,
            batch_seconds=seconds,
        )
        with _telling_what_is_kept(folder, progress):
            found = way.find(work)
        if "masks" in found.record:
            state.add(found.record)
    if store is not None:
        store.clear()
    ensemble = found.ensemble
    if ensemble is None:
        masks = [HeadMask(rows) for rows in found.record["masks"]]
        ensemble = fuse(host.model, masks, batch=first, task=host.task)
    ensemble.task = host.task
    ensemble.eval()
    ensemble.record = {
        "made_by": "build",
        "settings": settings,
        "examples": parts.examples(),
        **found.record,
    }
    calibrate_(
        ensemble,
        host.model,
        parts,
        score=score,
        temperatures=calibrate,
        novelty=novelty,
        seed=seed,
        progress=progress,
    )
    remember_inputs(ensemble, calibration)
    return ensemble


def check_labelled(task: Task) -> None:
    """Raise for a task without labels: nothing could choose its members."""
    if isinstance(task, Embedding):
        raise UnsupportedModelError(
            "An encoder has no labels to choose heads by. Fuse it with masks of your own, "
            "fuse(model, [HeadMask.random(model, keep=0.9, seed=seed) for seed in range(3)]), and "
            "call fit_novelty_(known); or build the classifier that it was fine-tuned to."
        )


def _try(host: HostModel, batch: Any) -> tuple[int, float]:
    """Run the host on a batch; return the size of its outputs and the seconds that it took."""
    check_inputs(batch, "the calibration data")
    with evaluating(host.model):
        start = time.perf_counter()
        logits = host.read(call_model(host.model, batch))
        return logits.shape[-1], time.perf_counter() - start


@contextmanager
def _telling_what_is_kept(folder: Any, progress: bool) -> Iterator[None]:
    """Say at Ctrl-C what a stopped build has kept, and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        announce(
            "Stopped. Nothing is kept: pass folder= to build() to be able to resume."
            if folder is None
            else f"Stopped. Progress is saved in {folder}. Run the same call to resume.",
            enabled=progress,
        )
        raise


def replay(model: nn.Module | HostModel, record: Mapping[str, Any]) -> HydraEnsemble:
    """Rebuild an ensemble from the record of `build`, without data (so without novelty).

    Members that differ by more than heads (`"parts"`, `"fold"`) have weights, which a record does
    not hold: save such an ensemble and load it with `from_pretrained`.

    Example:
        >>> again = replay(model, ensemble.record)
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"Expected the record of a build, ensemble.record; found a {type(record).__name__}."
        )
    if "masks" not in record and "fits" in record:
        raise DataError(
            f"Members of the method {record['settings']['method']!r} have fitted weights, which a "
            "record does not hold. Save the ensemble with save_pretrained() and load it with "
            "HydraEnsemble.from_pretrained(), or call build() again."
        )
    try:
        masks = [HeadMask(rows) for rows in record["masks"]]
        calibration, expected = record["calibration"], record["settings"]["model"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"Not a record of build() ({error!r} is missing): pass ensemble.record."
        ) from None
    host = host_model(model)
    if model_fingerprint(host.model) != expected:
        raise DataError(
            "The record was made for a model with other weights. Load the model that it was built "
            "from, or call build() again."
        )
    ensemble = fuse(host.model, masks).eval()
    ensemble.record = json.loads(json.dumps(dict(record)))
    apply_calibration_(ensemble, calibration)
    return ensemble
