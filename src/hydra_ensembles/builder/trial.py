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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.cost_record import CostRatio
from ..costs.formula import cost
from ..data.class_names import check_class_order, first_spellings, model_names
from ..data.input_facts import described
from ..data.loaders import Batches
from ..data.model_runs import collect_logits
from ..data.padding import joined_rows
from ..data.progress import progress_bar
from ..data.splits import split
from ..errors import DataError, UnsupportedModelError
from ..evaluation.results import Results
from ..fusion.ensemble import HydraEnsemble
from ..fusion.policy_data import policy_of
from ..hosts.example_inputs import pad_token
from ..prediction import Prediction
from ..tasks import MultiLabel, NextToken, Regression, Spans, Task, task_of
from ..uncertainty import Policy
from ..uncertainty.novelty_fit import COLUMNS
from .build_run import build
from .calibration import apply_calibration_, run_ensemble
from .data_parts import SHARES, in_memory
from .trial_outputs import (
    Measured,
    Outputs,
    calibrated_outputs,
    figures_of,
    own_labels,
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


@dataclass(frozen=True)
class Trial:
    """The result of `try_model`; all columns are in the order of the data.

    Attributes:
        ensemble: With temperatures, novelty and a policy; ready to be saved.
        answer: Its prediction for every example: uncertainty and novelty out of fold, and the
            policy's decision by these.
        labels: As `Task.check_labels` returns them, by example; or None.
        neighbours: The most similar other example, `[example]`.
        facts: Plain facts of each example that lie outside the range of the others, in words.
        held_out: Examples that took no part in choosing members, `[example]`.
        decide: Examples that the policy was fitted on, `[example]`.
        results: Figures on held-out examples of the host, of the host with a temperature (not of
            spans, which have none) and of the ensemble with its temperatures; empty without labels.
            Both temperatures were fitted by the same rule (`cross_fit`), out of fold, so that
            members get no credit for theirs.
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

    @property
    def uncertainty(self) -> Tensor:
        """How unsure the answer to each example is; of tokens the least sure one, `[example]`."""
        unsure: Tensor = self.answer.uncertainty
        if unsure.ndim == 1:
            return unsure
        return unsure.masked_fill(~self.answer.real, 0).amax(1)

    @property
    def wrong(self) -> Tensor | None:
        """Which answers are wrong, of tokens any of them; None where none is right or wrong."""
        if self.labels is None:
            return None
        errors = self.ensemble.task.errors(self.answer, self.labels)
        return errors if errors is None or errors.ndim == 1 else (errors & self.answer.real).any(1)


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
        model: A host model that gives classes, labels, numbers, tags or spans; it is not changed.
        data: Data like that to come, which the model was not trained on; some hundred examples,
            with or without labels (tags and spans: with).
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
    if task.by_token or task.ragged:
        labels = own_labels(source, task)
    if labels is not None:
        labels = task.check_labels(labels, "your data")
    host_logits = collect_logits(model, source, name="your model, as it is", progress=progress)[0]
    targets = labels
    if targets is None:
        mean = task.mean(host_logits.float())
        targets = mean.argmax(-1) if task.classifies else task.target(mean)
    labelled = source if task.by_token or task.ragged else with_labels(source, targets)
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
    outputs = Outputs(joined_rows([batch["logits"] for batch in batches]), labels, task)
    measured = Measured(
        source,
        torch.cat([batch["rows"] for batch in batches]) if "rows" in batches[0] else None,
        torch.cat([batch["summaries"] for batch in batches]),
        labels if task.classifies and not task.by_token else None,
        {
            **{n: torch.cat([b[n] for b in batches]) for n in sorted(COLUMNS & batches[0].keys())},
            **described(source),
        },
    )
    held_out = ~_mask(chosen, source.count)
    calibration: dict[str, Any] = {}
    results: tuple[Results, ...] = ()
    calibrated = outputs
    if labels is not None:
        plain = outputs._replace(members=host_logits)
        rows: dict[str, Any] = {"held_out": held_out, "fitted": learn, "seed": seed}
        fitted, calibrated = calibrated_outputs(outputs, plain, **rows)
        ensemble.record["calibration"] = {"score": task.default_score, **fitted}
        apply_calibration_(ensemble, ensemble.record["calibration"])
        calibration = fitted["figures"]
        judged = {HOST: plain}
        if task.calibrators:
            second = WARM if task.has_temperatures else SPREAD
            judged[second] = calibrated_outputs(plain, plain, **rows)[1]
        judged[ENSEMBLE] = calibrated
        tags = first_spellings(model_names(model) or []) if task.by_token else []
        results = tuple(figures_of(name, made, held_out, tags) for name, made in judged.items())
    else:
        ensemble.record["labels"] = "none: members keep the host's own answers"
    ensemble.novelty = measured.fit(ensemble, learn)
    ensemble.record["novelty"] = str(ensemble.novelty)
    bounds: dict[str, Any] = {"risk": risk, "alarm": alarm, "method": method}
    policy, note = _policy(ensemble, measured, outputs, decide, **bounds)
    ensemble.policy = policy
    rank, score, neighbours, facts = _out_of_fold(ensemble, measured, seed, progress=progress)
    answer = replace(calibrated.answer(), novelty=rank, novelty_score=score)
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


def _mask(part: Batches, count: int) -> Tensor:
    """Return which rows a part holds, bool `[count]`."""
    rows = torch.zeros(count, dtype=torch.bool)
    rows[list(part.indices)] = True
    return rows


def check_task(task: Task, name: str) -> None:
    """Raise for a task whose answers are neither right nor wrong."""
    if isinstance(task, (MultiLabel, Regression, Spans)) or (
        task.classifies and not isinstance(task, NextToken)
    ):
        return
    raise UnsupportedModelError(
        f"{name} is made for {task.title}, which a try cannot judge: no answer is right or wrong. "
        "In Python, hydra.fuse, fit_novelty_ and hydra.evaluate take this model."
    )


def _out_of_fold(
    ensemble: HydraEnsemble, measured: Measured, seed: int, *, progress: bool
) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, ...]]]:
    """Return what is said of every example by a fit without it.

    That is its novelty, its score, its nearest neighbour, and its facts outside the known ranges.
    """
    count = measured.source.count
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
    ensemble: HydraEnsemble,
    measured: Measured,
    outputs: Outputs,
    decide: Tensor,
    *,
    risk: float,
    alarm: float,
    method: str,
) -> tuple[Policy, str]:
    """Fit the policy on the unseen part; without a bound on errors where that part is too small."""
    assert ensemble.novelty is not None
    rows, task = decide[outputs.text].nonzero().flatten(), ensemble.task
    answer = outputs.answer(
        rows,
        temperature=ensemble.temperature,
        member_temperatures=ensemble.member_temperatures,
        **ensemble.calibrated_by(),
    )
    score = ensemble.novelty(measured.summaries[decide], measured.rows_at(decide))[1]
    targets = outputs.targets
    errors = None if targets is None else task.errors(answer, targets[rows])
    settings: dict[str, Any] = {"alarm": alarm, "method": method, "score": task.default_score}
    asked = None if errors is None else risk
    try:
        return policy_of(task, answer.uncertainty, errors, score, risk=asked, **settings), ""
    except DataError as error:
        note = f"{error} Until then only new inputs are withheld."
        return policy_of(task, answer.uncertainty, errors, score, risk=None, **settings), note
