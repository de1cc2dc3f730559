"""Columns of tasks other than one class per input; `figures` turns them into their figures."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..data.model_runs import ModelRun
from ..prediction import Prediction
from ..tasks import Task

DISAGREEMENT = ("mutual-information", "spread")
"""Scores of what members disagree about: one of them is a score of every task."""


def task_columns(run: ModelRun, task: Task, scores: Sequence[str]) -> dict[str, Tensor]:
    """Reduce a batch's results to columns by example; labelled ones where it has labels.

    `probabilities` and `active` are by label, `values` by number, `targets` by either.
    """
    members, labels = run.logits.double(), run.labels
    answering = run.answering_logits.double()
    apart = next(name for name in DISAGREEMENT if name in task.scores)
    columns = {
        f"score:{name}": task.score(members if name == apart else answering, name)
        for name in scores
    }
    columns["mutual_information"] = task.score(members, apart)
    if labels is None:
        return columns
    student = None if run.student_logits is None else run.student_logits.double()
    answer = task.answer(members, score=task.default_score, student_logits=student)
    mean = task.mean(answering)
    columns["loss"] = task.losses(mean, labels).double()
    errors = task.errors(answer, labels)
    if errors is not None:
        columns["correct"] = ~errors
    sigma = {} if run.sigma is None else {"sigma": run.sigma.double()}
    return columns | _matrices(answer, labels) | sigma


def _matrices(answer: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """Return what the figures of labels and numbers are made of, `[example, ...]`."""
    names = [n for n in ("probabilities", "active", "values", "member_values") if n in answer]
    found = {name: getattr(answer, name) for name in names}
    return {**found, "targets": labels} if found else {}
