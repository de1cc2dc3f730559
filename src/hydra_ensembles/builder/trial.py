"""Try a model on your own data: build, calibrate, fit novelty and a policy; all figures held out.

The data is split in two (stratified, seeded). *Learn* (two thirds) selects the members and fits
temperatures and novelty. *Decide* (one third) is seen by none of them: the policy is fitted on it,
so that its guarantees hold.

The novelty of single files is out of sample too: every file is ranked by statistics that were
fitted without it (five folds over all data; the model runs once). Figures of calibration are those
of examples that took no part in choosing members, under temperatures fitted without them.

Without labels, members are chosen to keep the host's own answers, and only novelty and its alarm
are fitted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..costs.cost_record import CostRatio
from ..costs.formula import cost
from ..data.class_names import check_class_order, first_spellings, model_names
from ..data.input_facts import described
from ..data.loaders import Batches
from ..data.model_runs import ModelRun, collect_logits
from ..data.padding import joined_rows
from ..data.progress import progress_bar
from ..data.splits import split
from ..errors import DataError, UnsupportedModelError
from ..evaluation.cross_fit import cross_fit, cross_fit_numbers
from ..evaluation.evaluator import results_of
from ..evaluation.figures import columns_of
from ..evaluation.results import Results
from ..fusion.ensemble import HydraEnsemble
from ..fusion.known_data import finished, novelty_fit, proxies_of, summaries_of
from ..fusion.policy_data import policy_for
from ..hosts.example_inputs import pad_token
from ..prediction import Prediction
from ..tasks import Embedding, Regression, Task, task_of
from ..tasks.tokens import is_language_model
from ..uncertainty import Policy
from ..uncertainty.novelty import Novelty
from ..uncertainty.novelty_fit import COLUMNS
from .build_run import build
from .calibration import apply_calibration_, run_ensemble
from .data_parts import SHARES, in_memory
from .trial_answers import (
    Places,
    answer_of,
    by_example,
    errors_of,
    own_answers,
    token_places,
    with_labels,
)

LEARN = 2 / 3
LEAST = 40
"""Fewest examples: novelty and an alarm of 5 % need as many."""
FOLDS = 5
HOST, WARM, ENSEMBLE = "your model", "your model + temperature", "Hydra"
"""Names of the results."""
SPREAD = "your model + variance"
"""The second one, of numbers."""
UNCALIBRATED = {"temperature": None, "member_temperatures": None}


@dataclass(frozen=True)
class Trial:
    """The result of `try_model`; all columns are in the order of the data.

    Attributes:
        ensemble: With temperatures, novelty and a policy; ready to be saved.
        answer: Its prediction for every example: uncertainty and novelty out of fold, and the
            policy's decision by these. Of tokens, only those that count are `real`.
        uncertainty: Of each example, that of its least sure token, `[example]`.
        wrong: Whether its answer, or that of any token, is wrong, `[example]`; None where none is.
        labels: `[example, ...]`, of tokens `[token]`; or None.
        neighbours: The most similar other example, `[example]`.
        facts: Plain facts of each example that lie outside the range of the others, in words.
        held_out: Examples that took no part in choosing members, `[example]`.
        decide: Examples that the policy was fitted on, `[example]`.
        results: Figures on held-out examples of the host, of the host with a temperature and of the
            ensemble with its temperatures; empty without labels. Both temperatures were fitted by
            the same rule (`cross_fit`), out of fold, so that members get no credit for theirs. Of
            a task without calibrators, those of the host and of the ensemble.
        calibration: What temperatures change, held out and out of fold; empty without labels.
        policy: When to answer.
        policy_note: Why the policy guarantees less than was asked for; empty when it does not.
        ratio: Counted cost relative to the host.
    """

    ensemble: HydraEnsemble
    answer: Prediction
    uncertainty: Tensor
    wrong: Tensor | None
    labels: Tensor | None
    neighbours: Tensor
    facts: list[tuple[str, ...]]
    held_out: Tensor
    decide: Tensor
    results: tuple[Results, ...]
    calibration: dict[str, Any]
    policy: Policy
    policy_note: str
    ratio: CostRatio


def try_model(
    model: nn.Module,
    data: Any,
    *,
    members: int | None = None,
    max_cost: float | None = 1.07,
    risk: float = 0.05,
    alarm: float = 0.05,
    method: str = "conformal",
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Trial:
    """Build an ensemble of a model and measure, held out, what it gains on some data.

    Args:
        model: A host model of any task but embeddings and language modelling; it is not changed.
        data: Data like that to come, which the model was not trained on; some hundred examples,
            with or without labels.
        members, max_cost: See `build`.
        risk, alarm, method: See `fit_policy`.
        seed: Random seed of splits, folds and the search.
        folder: Keep finished steps here, so that a stopped try resumes.
        progress: Report progress.

    Example:
        >>> trial = try_model(model, data)
        >>> trial.ensemble.save_pretrained("vit-hydra")
    """
    task = task_of(model)
    check_task(task, type(model).__name__, model)
    source = in_memory(data, pad_id=pad_token(model), progress=progress)
    if source.count < LEAST:
        raise DataError(
            f"{source.count} examples are too few to hold some out: give at least {LEAST}, better "
            "some hundred."
        )
    check_class_order(model, source, seed=seed)
    host_logits, labels = collect_logits(
        model, source, name="your model, as it is", progress=progress
    )
    places = token_places(source) if task.by_token else None
    text = torch.arange(source.count) if places is None else places.text
    labelled = source
    if labels is None:
        labelled = with_labels(
            source, own_answers(task, host_logits, places), by_token=task.by_token
        )
    halves = split(labelled, {"learn": LEARN, "decide": 1 - LEARN}, seed=seed)
    learn, decide = (_mask(halves[name], source.count) for name in ("learn", "decide"))
    chosen = split(halves["learn"], SHARES, seed=seed)["select"]  # as `build` splits it
    ensemble = build(
        model,
        halves["learn"],
        method="select" if labels is None else "auto",  # the host's own answers favour the host
        members=members,
        max_cost=max_cost,
        score=task.default_score,
        calibrate=False,
        novelty=False,
        seed=seed,
        folder=folder,
        progress=progress,
    )
    batches = list(run_ensemble(ensemble, source, name="your data", progress=progress))

    def column(name: str) -> Tensor | None:
        return torch.cat([b[name] for b in batches]) if name in batches[0] else None

    logits, summaries = joined_rows([batch["logits"] for batch in batches]), column("summaries")
    assert summaries is not None
    kept = {name: column(name) for name in sorted(COLUMNS & batches[0].keys())}
    measured = Measured(
        source,
        summaries,
        column("rows"),
        column("classes"),
        {**kept, **described(source)},
        progress,
    )
    held_out = ~_mask(chosen, source.count)
    calibration: dict[str, Any] = {}
    results: tuple[Results, ...] = ()
    calibrated = Calibrated(logits)
    ensemble.record["calibration"] = {**UNCALIBRATED, "score": task.default_score}
    if labels is not None:
        judged = {HOST: Calibrated(host_logits), ENSEMBLE: calibrated}
        if task.calibrators:
            rows: dict[str, Any] = {"held_out": held_out[text], "fitted": learn[text], "seed": seed}
            fitted, calibrated = _calibrated(task, logits, labels, host_logits, **rows)
            ensemble.record["calibration"].update(fitted)
            calibration = fitted["figures"]
            warm = _calibrated(task, host_logits, labels, host_logits, **rows)[1]
            second = WARM if task.has_temperatures else SPREAD
            judged = {HOST: judged[HOST], second: warm, ENSEMBLE: calibrated}
        tags = first_spellings(model_names(model) or [])
        results = tuple(
            _results(name, outputs, labels, held_out[text], task, places, tags)
            for name, outputs in judged.items()
        )
    else:
        ensemble.record["labels"] = "none: members keep the host's own answers"
    apply_calibration_(ensemble, ensemble.record["calibration"])
    ensemble.novelty = measured.fit(ensemble, learn)
    ensemble.record["novelty"] = str(ensemble.novelty)
    fitted_by: dict[str, Any] = {
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        **ensemble.calibrated_by(),
    }
    final = answer_of(task, logits, places, **fitted_by)
    errors = None if labels is None else errors_of(task, final, labels, places)
    policy, note = _policy(
        task,
        by_example(final.uncertainty, places)[decide[text]],
        None if errors is None else errors[decide[text]],
        ensemble.novelty(summaries[decide], measured.rows_at(decide))[1],
        risk=risk,
        alarm=alarm,
        method=method,
    )
    ensemble.policy = policy
    rank, score, neighbours, facts = _out_of_fold(ensemble, measured, seed, progress=progress)
    columns: dict[str, Any] = {"novelty": rank, "novelty_score": score}
    if calibrated.sigma is not None:
        columns["sigma"] = calibrated.sigma.float()
    answer = replace(answer_of(task, calibrated.members, places), **columns)
    unsure = by_example(answer.uncertainty, places)
    errors = None if labels is None else errors_of(task, answer, labels, places)
    batch = next(iter(source))
    return Trial(
        ensemble=ensemble,
        answer=policy.apply(answer),
        uncertainty=unsure if places is None else places.most(unsure),
        wrong=errors if errors is None or places is None else places.most(errors),
        labels=labels,
        neighbours=neighbours,
        facts=facts,
        held_out=held_out,
        decide=decide,
        results=results,
        calibration=calibration,
        policy=policy,
        policy_note=note,
        ratio=cost(ensemble, batch).relative_to(cost(ensemble.unpruned_host(), batch)),
    )


def _mask(part: Batches, count: int) -> Tensor:
    """Return which rows a part holds, bool `[count]`."""
    rows = torch.zeros(count, dtype=torch.bool)
    rows[list(part.indices)] = True
    return rows


def check_task(task: Task, name: str, model: object = None) -> None:
    """Raise for a task that cannot be tried: its answers are not right or wrong, or too many."""
    if isinstance(task, Embedding):
        raise UnsupportedModelError(
            f"{name} is made for {task.title}, which no data can judge: vectors are not right or "
            "wrong. In Python, hydra.fuse and fit_novelty_ take this model."
        )
    if task.by_token and is_language_model(model):
        raise UnsupportedModelError(
            f"{name} is made for {task.title} over a whole vocabulary, which a try cannot judge "
            "yet. In Python, hydra.fuse, fit_novelty_ and hydra.evaluate take this model."
        )


class Calibrated(NamedTuple):
    """Outputs of members `[example, member, ...]`, calibrated; and sigmas of numbers."""

    members: Tensor
    sigma: Tensor | None = None


def _calibrated(
    task: Task,
    outputs: Tensor,
    labels: Tensor,
    host: Tensor,
    *,
    held_out: Tensor,
    fitted: Tensor,
    seed: int,
) -> tuple[dict[str, Any], Calibrated]:
    """Calibrate outputs by the task; return it as a record has it, and the outputs out of fold."""
    if isinstance(task, Regression):
        found, record, sigma = cross_fit_numbers(
            outputs, labels, held_out=held_out, fitted=fitted, seed=seed
        )
        return {**found.to_dict(), "figures": record}, Calibrated(outputs, sigma)
    record, judged = cross_fit(
        outputs,
        labels,
        host,
        held_out=held_out,
        fitted=fitted,
        calibrators=task.calibrators,
        seed=seed,
    )
    return record, Calibrated(judged)


@dataclass(frozen=True)
class Measured:
    """What novelty is fitted from, by input.

    Attributes:
        source: The data.
        summaries: Token summaries, `[input, tap, width]`.
        rows: Logits that novelty reads, `[input, member, class]`, if it reads any.
        classes: Labels of inputs that have one class, `[input]`; else None.
        columns: What else is known of the inputs (`NoveltyFit.add_columns_`).
        progress: Report progress.
        far: What novelty reads of proxies by kind, once a choice of terms has asked for them.
    """

    source: Batches
    summaries: Tensor
    rows: Tensor | None
    classes: Tensor | None
    columns: dict[str, Any]
    progress: bool
    far: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)

    def columns_at(self, rows: Tensor) -> dict[str, Any]:
        """Return the columns at some rows, which are numbers."""
        return {
            name: column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]
            for name, column in self.columns.items()
        }

    def rows_at(self, rows: Tensor) -> Tensor | None:
        """Return the logits that novelty reads at some rows."""
        return None if self.rows is None else self.rows[rows]

    def fit(self, ensemble: HydraEnsemble, mask: Tensor) -> Novelty:
        """Fit novelty on some inputs, bool `[input]`."""
        rows = self.rows_at(mask)
        fit = novelty_fit(ensemble, 0 if rows is None else rows.shape[-1])
        labels = None if self.classes is None else self.classes[mask]
        fit.add_(self.summaries[mask], rows, labels)
        fit.add_columns_(self.columns_at(mask.nonzero().flatten()))

        def add_proxies() -> None:
            if not self.far:  # all fits share them: they only forbid terms
                made = proxies_of(self.source).items()
                for name, data in made:
                    self.far[name] = list(summaries_of(ensemble, data, name, self.progress))
            for name, batches in self.far.items():
                for found in batches:
                    fit.add_ood_(name, found["summaries"], found.get("logits"))

        return finished(ensemble, fit, self.source, add_proxies=add_proxies)


def _out_of_fold(
    ensemble: HydraEnsemble, measured: Measured, seed: int, *, progress: bool
) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, ...]]]:
    """Return what is said of every example by a fit without it.

    That is its novelty, its score, its nearest neighbour, and its facts outside the known ranges.
    """
    count = len(measured.summaries)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    rank, score = torch.empty(count), torch.empty(count)
    nearest = torch.empty(count, dtype=torch.long)
    facts: list[tuple[str, ...]] = [()] * count
    folds = progress_bar(range(FOLDS), description="novelty", enabled=progress, unit="folds")
    for fold in folds:
        rows = order[fold::FOLDS]
        others = torch.ones(count, dtype=torch.bool)
        others[rows] = False
        novelty = measured.fit(ensemble, others)
        logits = measured.rows_at(rows)
        evidence = novelty.explain(measured.summaries[rows], logits, 1)
        rank[rows], score[rows] = evidence.novelty.float(), evidence.score.float()
        nearest[rows] = others.nonzero().flatten()[evidence.neighbours[:, 0]]
        outside = novelty.ranges.outside(measured.columns_at(rows), len(rows))
        for row, words in zip(rows.tolist(), outside, strict=True):
            facts[row] = words
    return rank, score, nearest, facts


def _policy(
    task: Task,
    uncertainty: Tensor,
    errors: Tensor | None,
    novelty_score: Tensor,
    *,
    risk: float,
    alarm: float,
    method: str,
) -> tuple[Policy, str]:
    """Fit the policy on the unseen part; without a bound on errors where that part is too small."""
    settings: dict[str, Any] = {"alarm": alarm, "method": method, "score": task.default_score}
    asked = None if errors is None else risk
    try:
        return policy_for(task, uncertainty, errors, novelty_score, risk=asked, **settings), ""
    except DataError as error:
        note = f"{error} Until then only new inputs are withheld."
        policy = policy_for(task, uncertainty, errors, novelty_score, risk=None, **settings)
        return policy, note


def _results(
    name: str,
    outputs: Calibrated,
    labels: Tensor,
    rows: Tensor,
    task: Task,
    places: Places | None,
    tags: Sequence[str],
) -> Results:
    """Return the figures of some outputs on some examples, bool `[example]`, with intervals."""
    sigma = None if outputs.sigma is None else outputs.sigma[rows]
    text = None if places is None else places.text[rows]
    run = ModelRun(outputs.members[rows], labels[rows], sigma=sigma, text=text)
    columns = columns_of(run, scores=[task.default_score], task=task, names=tags)
    settings = {
        "scores": [task.default_score],
        "members": run.logits.shape[1],
        "classes": run.logits.shape[2],
        "examples": {"id": len(run.logits)},
        "temperature": None,
        "bootstrap": None,
        "seed": 0,
    }
    return results_of({"id": columns}, name=name, settings=settings)
