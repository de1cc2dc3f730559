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
from ..data.batches import without_labels
from ..data.class_names import check_class_order
from ..data.input_facts import described
from ..data.loaders import Batches
from ..data.model_runs import ModelRun, collect_logits
from ..data.progress import progress_bar
from ..data.splits import split
from ..errors import DataError, UnsupportedModelError
from ..evaluation.cross_fit import cross_fit, cross_fit_numbers
from ..evaluation.evaluator import results_of
from ..evaluation.figures import columns_of
from ..evaluation.results import Results
from ..fusion.ensemble import HydraEnsemble
from ..fusion.known_data import finished, novelty_fit, proxies_of, summaries_of
from ..hosts.example_inputs import pad_token
from ..prediction import Prediction
from ..tasks import MultiLabel, Regression, Task, task_of
from ..uncertainty import Policy, choose_policy
from ..uncertainty.novelty import Novelty
from ..uncertainty.novelty_fit import COLUMNS
from ..uncertainty.policy_fit import check_reachable
from .build_run import build
from .calibration import apply_calibration_, run_ensemble
from .data_parts import SHARES, in_memory

LEARN = 2 / 3
LEAST = 40
"""Fewest examples: novelty and an alarm of 5 % need as many."""
FOLDS = 5
HOST, WARM, ENSEMBLE = "your model", "your model + temperature", "Hydra"
"""Names of the results."""
SPREAD = "your model + variance"
"""The second one, of numbers."""


@dataclass(frozen=True)
class Trial:
    """The result of `try_model`; all columns are in the order of the data.

    Attributes:
        ensemble: With temperatures, novelty and a policy; ready to be saved.
        answer: Its prediction for every example: uncertainty and novelty out of fold, and the
            policy's decision by these.
        labels: `[example]`, or None.
        neighbours: The most similar other example, `[example]`.
        facts: Plain facts of each example that lie outside the range of the others, in words.
        held_out: Examples that took no part in choosing members, `[example]`.
        decide: Examples that the policy was fitted on, `[example]`.
        results: Figures on held-out examples of the host, of the host with a temperature and of the
            ensemble with its temperatures; empty without labels. Both temperatures were fitted by
            the same rule (`cross_fit`), out of fold, so that members get no credit for theirs.
        calibration: What temperatures change, held out and out of fold; empty without labels.
        policy: When to answer.
        policy_note: Why the policy guarantees less than was asked for; empty when it does not.
        ratio: Counted cost relative to the host.
    """

    ensemble: HydraEnsemble
    answer: Prediction
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
        model: A host model that gives classes, labels or numbers; it is not changed.
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
    check_task(task, type(model).__name__)
    source = in_memory(data, pad_id=pad_token(model), progress=progress)
    if source.count < LEAST:
        raise DataError(
            f"{source.count} examples are too few to hold some out: give at least {LEAST}, better "
            "some hundred."
        )
    check_class_order(model, source, seed=seed)
    labels = source.labels
    if labels is not None:
        labels = task.check_labels(labels, "your data")
    host_logits = collect_logits(model, source, name="your model, as it is", progress=progress)[0]
    targets = labels
    if targets is None:
        mean = task.mean(host_logits.float())
        targets = mean.argmax(-1) if task.classifies else task.target(mean)
    labelled = with_labels(source, targets)
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
    logits = torch.cat([batch["logits"] for batch in batches])
    measured = Measured(
        source,
        logits,
        torch.cat([batch["summaries"] for batch in batches]),
        labels,
        {
            **{n: torch.cat([b[n] for b in batches]) for n in sorted(COLUMNS & batches[0].keys())},
            **described(source),
        },
        progress,
    )
    held_out = ~_mask(chosen, source.count)
    calibration: dict[str, Any] = {}
    results: tuple[Results, ...] = ()
    calibrated = Calibrated(logits)
    if labels is not None:
        rows: dict[str, Any] = {"held_out": held_out, "fitted": learn, "seed": seed}
        fitted, calibrated = _calibrated(task, logits, labels, host_logits, **rows)
        ensemble.record["calibration"] = {"score": task.default_score, **fitted}
        apply_calibration_(ensemble, ensemble.record["calibration"])
        calibration = fitted["figures"]
        warm = _calibrated(task, host_logits, labels, host_logits, **rows)[1]
        second = WARM if task.has_temperatures else SPREAD
        judged = {HOST: Calibrated(host_logits), second: warm, ENSEMBLE: calibrated}
        results = tuple(
            _results(name, outputs, labels, held_out, task) for name, outputs in judged.items()
        )
    else:
        ensemble.record["labels"] = "none: members keep the host's own answers"
    ensemble.novelty = measured.fit(ensemble, learn)
    ensemble.record["novelty"] = str(ensemble.novelty)
    policy, note = _policy(ensemble, measured, decide, risk=risk, alarm=alarm, method=method)
    ensemble.policy = policy
    rank, score, neighbours, facts = _out_of_fold(ensemble, measured, seed, progress=progress)
    answer = replace(calibrated.answer(task), novelty=rank, novelty_score=score)
    batch = next(iter(source))
    return Trial(
        ensemble=ensemble,
        answer=policy.apply(answer),
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


def with_labels(data: Batches, labels: Tensor) -> Batches:
    """Return data with these labels instead of its own."""

    def load(rows: Sequence[int]) -> Any:
        batch = without_labels(next(iter(data.subset(rows, batch_size=len(rows)))))
        target = labels[list(rows)]
        if isinstance(batch, dict):
            return {**batch, "labels": target}
        return (batch[0] if isinstance(batch, tuple) else batch, target)

    return Batches(
        load, range(data.count), batch_size=data.batch_size, labels=labels, info=data.info
    )


def _mask(part: Batches, count: int) -> Tensor:
    """Return which rows a part holds, bool `[count]`."""
    rows = torch.zeros(count, dtype=torch.bool)
    rows[list(part.indices)] = True
    return rows


def check_task(task: Task, name: str) -> None:
    """Raise for a task that cannot be tried yet: one answer per input is judged."""
    if isinstance(task, (MultiLabel, Regression)) or (task.classifies and not task.by_token):
        return
    raise UnsupportedModelError(
        f"{name} is made for {task.title}, which a try cannot judge yet: it asks for one answer "
        "per input (a class, labels or numbers). In Python, hydra.fuse, fit_novelty_ and "
        "hydra.evaluate take this model."
    )


class Calibrated(NamedTuple):
    """Outputs of members `[example, member, ...]`, calibrated; and sigmas of numbers."""

    members: Tensor
    sigma: Tensor | None = None

    def answer(self, task: Task) -> Prediction:
        """Return the task's answers."""
        answer = task.answer(self.members, score=task.default_score)
        more: dict[str, Any] = {} if self.sigma is None else {"sigma": self.sigma.float()}
        return replace(answer, **more)


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
    """What the ensemble computed on all examples, from which novelty is fitted.

    Attributes:
        source: The data.
        logits: `[example, member, class]`.
        summaries: Token summaries, `[example, tap, width]`.
        labels: `[example]`, or None.
        columns: What else is known of the examples (`NoveltyFit.add_columns_`).
        progress: Report progress.
        far: What novelty reads of proxies by kind, once a choice of terms has asked for them.
    """

    source: Batches
    logits: Tensor
    summaries: Tensor
    labels: Tensor | None
    columns: dict[str, Any]
    progress: bool
    far: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)

    def columns_at(self, rows: Tensor) -> dict[str, Any]:
        """Return the columns at some rows, which are numbers."""
        return {
            name: column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]
            for name, column in self.columns.items()
        }

    def rows_at(self, task: Task, rows: Tensor) -> Tensor | None:
        """Return the logits at some rows if novelty reads any (`Task.novelty_rows`)."""
        return task.novelty_rows(self.logits[rows], None)

    def fit(self, ensemble: HydraEnsemble, mask: Tensor) -> Novelty:
        """Fit novelty on some examples, bool `[example]`."""
        task = ensemble.task
        rows = self.rows_at(task, mask)
        fit = novelty_fit(ensemble, 0 if rows is None else rows.shape[-1])
        labels = None if self.labels is None or not task.classifies else self.labels[mask]
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
    count = len(measured.logits)
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
        logits = measured.rows_at(ensemble.task, rows)
        evidence = novelty.explain(measured.summaries[rows], logits, 1)
        rank[rows], score[rows] = evidence.novelty.float(), evidence.score.float()
        nearest[rows] = others.nonzero().flatten()[evidence.neighbours[:, 0]]
        outside = novelty.ranges.outside(measured.columns_at(rows), len(rows))
        for row, words in zip(rows.tolist(), outside, strict=True):
            facts[row] = words
    return rank, score, nearest, facts


def _policy(
    ensemble: HydraEnsemble,
    measured: Measured,
    decide: Tensor,
    *,
    risk: float,
    alarm: float,
    method: str,
) -> tuple[Policy, str]:
    """Fit the policy on the unseen part; without a bound on errors where that part is too small."""
    assert ensemble.novelty is not None
    logits, summaries, labels = measured.logits, measured.summaries, measured.labels
    task = ensemble.task
    answer = task.answer(
        logits[decide],
        score=task.default_score,
        temperature=ensemble.temperature,
        member_temperatures=ensemble.member_temperatures,
        **ensemble.calibrated_by(),
    )
    score = ensemble.novelty(summaries[decide], measured.rows_at(task, decide))[1]
    errors = None if labels is None else task.errors(answer, labels[decide])
    asked = None if errors is None else risk
    settings: dict[str, Any] = {
        "novelty_score": score,
        "alarm": alarm,
        "method": method,
        "score": task.default_score,
    }
    policy = choose_policy(answer.uncertainty, errors, risk=asked, **settings)
    try:
        check_reachable(policy, answer.uncertainty, errors, score)
    except DataError as error:
        note = f"{error} Until then only new inputs are withheld."
        return choose_policy(answer.uncertainty, errors, risk=None, **settings), note
    return policy, ""


def _results(name: str, outputs: Calibrated, labels: Tensor, rows: Tensor, task: Task) -> Results:
    """Return the figures of some outputs on some rows, with intervals."""
    sigma = None if outputs.sigma is None else outputs.sigma[rows]
    run = ModelRun(outputs.members[rows], labels[rows], sigma=sigma)
    examples = {"id": columns_of(run, scores=[task.default_score], task=task)}
    settings = {
        "scores": [task.default_score],
        "members": run.logits.shape[1],
        "classes": run.logits.shape[2],
        "examples": {"id": len(run.logits)},
        "temperature": None,
        "bootstrap": None,
        "seed": 0,
    }
    return results_of(examples, name=name, settings=settings)
