"""Columns of tasks other than one class per input; `figures` turns them into their figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.model_runs import ModelRun
from ..prediction import Prediction
from ..task_predictions import SpanPrediction, entities_of
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
    if isinstance(answer, SpanPrediction):
        columns |= _span_columns(answer, labels)
    sigma = {} if run.sigma is None else {"sigma": run.sigma.double()}
    return columns | _matrices(answer, labels) | sigma


def _span_columns(answer: SpanPrediction, labels: Tensor) -> dict[str, Tensor]:
    """Return whether each span is exact, and the F1 of its tokens with the true ones, `[batch]`.

    Both tokens at 0 mean "no answer": that agrees with itself only.
    """
    first, last = torch.maximum(answer.start, labels[:, 0]), torch.minimum(answer.end, labels[:, 1])
    shared = (last - first + 1).clamp_min(0).double()
    lengths = answer.end - answer.start + labels[:, 1] - labels[:, 0] + 2
    exact = (answer.start == labels[:, 0]) & (answer.end == labels[:, 1])
    return {"exact": exact, "overlap": 2 * shared / lengths}


def entity_columns(
    predicted: Tensor, labels: Tensor, text: Tensor, uncertainty: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return what the figures of entities are made of, told at the first token of each text.

    Args:
        predicted, labels: Classes of the labelled tokens, `[token]`.
        text: The text of each token, `[token]`.
        uncertainty: Of each token; an entity is as unsure as its least sure token.
        names: Names of the classes, such as `B-LOC`.
    """
    counts = torch.zeros(len(labels), 3, dtype=torch.long)
    wrong, unsure = torch.full((len(labels),), -1), torch.zeros(len(labels), dtype=torch.float64)
    ends = text.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        tags = ([names[i] for i in row[start:end].tolist()] for row in (predicted, labels))
        said, true = map(entities_of, tags)
        counts[start] = torch.tensor([len(said & true), len(said), len(true)])
        for entity in said:
            _, first, last = entity
            wrong[start + first] = int(entity not in true)
            unsure[start + first] = uncertainty[start + first : start + last + 1].max()
    return {"entities": counts, "entity_wrong": wrong, "entity_uncertainty": unsure}


def _matrices(answer: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """Return what the figures of labels and numbers are made of, `[example, ...]`."""
    names = [n for n in ("probabilities", "active", "values", "member_values") if n in answer]
    found = {name: getattr(answer, name) for name in names}
    return {**found, "targets": labels} if found else {}
