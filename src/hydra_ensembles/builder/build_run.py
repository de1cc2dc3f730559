"""`build` and `replay`: members, fused; score and temperatures, fitted; everything recorded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from .._records import model_fingerprint
from ..costs.budget import Budget
from ..data import processes
from ..data.batches import check_inputs
from ..data.class_names import check_class_order
from ..data.eval_mode import evaluating
from ..data.memory import in_plain_words
from ..data.model_runs import call_model, check_data, member_logits_of
from ..data.progress import announce
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse
from ..fusion.inputs import remember_inputs
from ..heads.head_mask import HeadMask
from ..hosts import HostModel, host_model
from ..hosts.example_inputs import pad_token
from ..search.ray_tasks import ray_tasks
from ..search.search_state import SearchState, TensorStore
from ..uncertainty import scores
from .calibration import apply_decisions, decide, learn_known
from .data_parts import Parts, Task
from .methods import Method, as_method


@in_plain_words()
@processes.holds("folder")
def build(
    model: nn.Module | HostModel,
    calibration: Any,
    *,
    ood: Any = "auto",
    validation: Any = None,
    method: str | Method = "select",
    members: int = 3,
    max_cost: float | None = 1.07,
    score: str = "auto",
    calibrate: bool = True,
    novelty: bool | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    ray: bool = False,
    workers: int = 2,
    progress: bool = True,
) -> HydraEnsemble:
    """Build an ensemble of a pretrained model: members, score and temperatures, nothing trained.

    Under `torchrun` or `accelerate launch` the processes share the batches: call it in all of them,
    and each gets the same members.

    Args:
        model: A host model with a classifier; left as it was.
        calibration: Labelled in-distribution data that the model was not trained on; some hundred
            examples. Split by itself (stratified, seeded): 60 % select, 20 % decide when to stop,
            20 % see neither. Temperatures are cross-fitted over all of it; their figures are those
            of the 40 % that did not select.
        ood: Outliers: data, a dict of data by family, or `"auto"` (or None) for none. The methods
            `search` and `circuit` join proxies that are made of the calibration data.
        validation: Labelled data that stops and fits temperatures in place of the split.
        method: `"select"` (members by the ensemble's own figures, in a few passes over the data),
            `"search"` (the same for many minutes, with proxies), `"circuit"` (HeadMap with one
            objective per member, as in the paper), `"taylor"`, `"hies"` or `"random"`; or a config
            object with the method's own options: `Select(masks=96)`, `Search(masks=600)`,
            `Circuits(keep=0.5)`, `Taylor(keep=0.5)`, `Hies(alphas=(0.5,))`, `Random(keep=2)`.
        members: Number of members M. They differ; where that is impossible, the summary and
            `record["equal_members"]` say why.
        max_cost: Bound on counted multiply-adds relative to the plain model; None for none.
        score: The uncertainty that `predict` reports, or `"auto"`: the best on held-out outliers,
            `"msp"` without any.
        calibrate: Fit a temperature per member and one for the mean, where out of fold that lowers
            NLL; else they are 1 and the record says so.
        novelty: Fit novelty on the calibration data (`fit_novelty_`). By default where that is
            possible: otherwise a warning and the summary say why not. True raises instead.
        seed: Of splits, proxies, pools and bags.
        folder: Keep finished steps here (candidates' logits, up to 1 GB, until the search is done),
            so that a stopped build goes on and ends with the same members. Another model, other
            data or settings are refused.
        ray: Run the candidates of `select`, `search` and `circuit` as Ray tasks, on the cluster of
            `RAY_ADDRESS` or on this machine; the members are the same to the bit (`ray_tasks`).
        workers: Ray tasks at a time.
        progress: Report progress: a bar on a terminal, else a log line every ten seconds.

    Returns:
        The ensemble, in eval mode; `.record` says what was done and can be given to `replay`.

    Example:
        >>> ensemble = build(model, calibration, ood={"textures": textures})
        >>> ensemble.predict(batch).uncertainty
    """
    way = as_method(method)
    if ray and not getattr(way, "searches", False):
        raise ValueError(
            f"ray=True says nothing to the method {way.name!r}, which tries no candidates: leave "
            "it out."
        )
    if members < 1:
        raise ValueError(f"members={members}: expected 1 or more.")
    if score != "auto":
        scores[score]  # an unknown name fails now
    host = host_model(model)
    check_data(host.model, calibration)
    check_class_order(host.model, calibration, seed=seed)
    pad_id = pad_token(host.model)
    parts = Parts(calibration, validation, ood, seed, proxies=way.proxies, pad_id=pad_id)
    classes, seconds = _try(host, parts.first_batch())
    settings: dict[str, Any] = {
        "method": way.name,
        "options": way.settings(),
        "members": members,
        "max_cost": max_cost,
        "score": score,
        "calibrate": calibrate,
        "seed": seed,
        "model": model_fingerprint(host.model),
        "data": processes.on_first(lambda: parts.fingerprints(classes)),
    }
    settings = json.loads(json.dumps(settings))
    state = SearchState(folder, settings, name="build.json")
    store = None if folder is None else TensorStore(Path(folder) / "candidates")
    result = next((step for step in state.steps if "masks" in step), None)
    if result is None:
        budget = Budget.of(host, parts.first_batch(), max_cost)
        task = Task(host, parts, members, budget, seed, state, store, progress, seconds)
        with _telling_what_is_kept(folder, progress), ray_tasks(workers) if ray else nullcontext():
            result = way.find(task)
        state.add(result)
    if store is not None:
        store.clear()
    masks = [HeadMask(rows) for rows in result["masks"]]
    ensemble = fuse(host.model, masks, batch=parts.first_batch()).eval()
    decisions = decide(
        ensemble,
        host.model,
        parts,
        score=score,
        calibrate=calibrate,
        seed=seed,
        progress=progress,
    )
    ensemble.record = {
        "made_by": "build",
        "settings": settings,
        "examples": parts.examples(),
        **result,
        "decisions": decisions,
    }
    apply_decisions(ensemble, decisions)
    if novelty is not False:
        learn_known(ensemble, parts, required=novelty is True, progress=progress)
    remember_inputs(ensemble, calibration)
    return ensemble


def _try(host: HostModel, batch: Any) -> tuple[int, float]:
    """Run the host on a batch; return its number of classes and the seconds that it took."""
    check_inputs(batch, "the calibration data")
    with evaluating(host.model):
        start = time.perf_counter()
        logits = member_logits_of(call_model(host.model, batch))
        return logits.shape[-1], time.perf_counter() - start


@contextmanager
def _telling_what_is_kept(folder: Any, progress: bool) -> Iterator[None]:
    """Say at Ctrl-C what a stopped build has kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        announce(
            "Stopped. Nothing is kept: pass folder= to build() to go on after a stop."
            if folder is None
            else f"Stopped. Finished steps are kept in {folder}: the same call goes on from there.",
            enabled=progress,
        )
        raise


def replay(model: nn.Module | HostModel, record: Mapping[str, Any]) -> HydraEnsemble:
    """Make an ensemble again from what `build` recorded, without data (so without novelty)."""
    try:
        masks = [HeadMask(rows) for rows in record["masks"]]
        decisions, expected = record["decisions"], record["settings"]["model"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"Not a record of build() ({error!r} is missing): pass ensemble.record."
        ) from None
    host = host_model(model)
    if model_fingerprint(host.model) != expected:
        raise DataError(
            "The record was made for a model with other weights. Load the model that it was built "
            "from, or build() anew."
        )
    ensemble = fuse(host.model, masks).eval()
    ensemble.record = json.loads(json.dumps(dict(record)))
    apply_decisions(ensemble, decisions)
    return ensemble
