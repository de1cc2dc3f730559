"""Answers of a try by input, from outputs by example: of a task by token, tokens are examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batches import describe, labels_of, without_labels
from ..data.loaders import Batches
from ..errors import DataError
from ..prediction import Prediction
from ..tasks import IGNORED, Spans, Task


@dataclass(frozen=True)
class Places:
    """Where the examples of a task by token are.

    Attributes:
        text, token: The text of each example, and its place there, `[example]`.
        count: Number of texts.
    """

    text: Tensor
    token: Tensor
    count: int

    def spread(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return values `[example, ...]` at their places, `[text, token, ...]`."""
        shape = (self.count, int(self.token.max()) + 1, *values.shape[1:])
        found = values.new_full(shape, fill)
        found[self.text, self.token] = values
        return found

    def most(self, values: Tensor) -> Tensor:
        """Return each text's highest value, `[text]`; 0 for a text without examples."""
        found = torch.zeros(self.count, dtype=torch.float64)
        return found.scatter_reduce(0, self.text, values.double(), "amax").to(values.dtype)


def token_places(data: Batches) -> Places:
    """Return where the tokens are that count: real ones, and labelled ones if there are labels."""
    rows, count = [], 0
    for batch in data:
        ids = batch.get("input_ids") if isinstance(batch, dict) else None
        if not isinstance(ids, Tensor):
            raise DataError(f"Expected texts as batches with input_ids; found {describe(batch)}.")
        labels = labels_of(batch)
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        if not bool(mask[:, 0].all()):
            raise DataError(
                "These texts are padded on the left; a try of tokens expects padding on the right: "
                'set tokenizer.padding_side = "right".'
            )
        counted = mask if labels is None else mask & (labels != IGNORED)
        rows.append(counted.nonzero() + torch.tensor([count, 0]))
        count += len(ids)
    text, token = torch.cat(rows).unbind(1)
    return Places(text, token, count)


def answer_of(task: Task, outputs: Tensor, places: Places | None, **options: Any) -> Prediction:
    """Return the task's answers by input, of outputs by example."""
    if places is not None:
        outputs = places.spread(outputs).transpose(1, 2)
        options["inputs"] = {"attention_mask": places.spread(torch.ones_like(places.text))}
    return task.answer(outputs, score=task.default_score, **options)


def by_example(column: Tensor, places: Places | None) -> Tensor:
    """Return a column of answers by example."""
    return column if places is None else column[places.text, places.token]


def errors_of(
    task: Task, answer: Prediction, labels: Tensor, places: Places | None
) -> Tensor | None:
    """Tell which examples are wrong, bool `[example]`; None where no answer is right or wrong."""
    given = labels if places is None else places.spread(labels, IGNORED)
    errors = task.errors(answer, given)
    return None if errors is None else by_example(errors, places)


def own_answers(task: Task, outputs: Tensor, places: Places | None) -> Tensor:
    """Return the host's answers as labels by input."""
    mean = task.mean(outputs.float())
    if isinstance(task, Spans):
        answer = task.answer(outputs, score=task.default_score)
        return torch.stack([answer.start, answer.end], 1)
    if places is not None:
        return places.spread(mean.argmax(-1), IGNORED)
    return mean.argmax(-1) if task.classifies else task.target(mean)


def with_labels(data: Batches, labels: Tensor, *, by_token: bool = False) -> Batches:
    """Return data with these labels instead of its own; those by token are cut to the batch."""

    def load(rows: Sequence[int]) -> Any:
        batch = without_labels(next(iter(data.subset(rows, batch_size=len(rows)))))
        target = labels[list(rows)]
        if isinstance(batch, dict) and by_token:
            return {**batch, "labels": target[:, : batch["input_ids"].shape[1]]}
        if isinstance(batch, dict):
            return {**batch, "labels": target}
        return (batch[0] if isinstance(batch, tuple) else batch, target)

    return Batches(
        load, range(data.count), batch_size=data.batch_size, labels=labels, info=data.info
    )
