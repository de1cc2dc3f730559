"""A model's answers to one batch: logits and, where there are any, novelty and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from ..prediction import Prediction

IGNORED = -100
"""Label of a token that does not count."""


class Answers(NamedTuple):
    """A model's answers to one batch, on the CPU, with the batch's labels.

    Attributes:
        logits: The members' logits, `[batch, member, class]`.
        labels: `[batch]`, or None.
        novelty, novelty_score: As in `Prediction`, `[batch]`; None when novelty is not fitted.
        code: As in `Prediction`, `[batch]`; None without a policy.
        student_logits: As in `Prediction`, `[batch, class]`; None without a student.
    """

    logits: Tensor
    labels: Tensor | None
    novelty: Tensor | None = None
    novelty_score: Tensor | None = None
    code: Tensor | None = None
    student_logits: Tensor | None = None

    @property
    def answering_logits(self) -> Tensor:
        """Logits behind the probabilities, `[batch, member, class]`; a student is one member."""
        return self.logits if self.student_logits is None else self.student_logits[:, None]


def flat_tokens(
    model: Any, mask: Any, logits: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Make one example per real, labelled token of a token classifier; leave others alone."""
    by_token = logits.ndim == 4
    if logits.ndim == 3:  # one model's [batch, token, class], or members without tokens
        named = type(model).__name__.endswith("ForTokenClassification")
        by_token = named if labels is None else labels.shape == logits.shape[:2]
        logits = logits[:, None] if by_token else logits
    if not by_token:
        return logits, labels
    shape = (logits.shape[0], logits.shape[2])
    real = torch.ones(shape, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == shape:
        real = mask.cpu().bool()
    if labels is not None:
        if labels.shape != shape:
            raise DataError(
                f"Labels of shape {list(labels.shape)} for {shape[1]} tokens of {shape[0]} texts: "
                "expected one label per token, -100 for tokens to ignore."
            )
        labels = labels.cpu()
        real &= labels != IGNORED
        labels = labels[real]
    return logits.transpose(1, 2)[real], labels


def answers_from(output: Any, logits: Tensor, labels: Tensor | None) -> Answers:
    """Add what a `Prediction` says beside its logits; other outputs say nothing more."""
    if not isinstance(output, Prediction):
        return Answers(logits, labels)
    # novelty and decisions are of texts; where the examples are tokens, they do not apply
    extra = {
        name: value.cpu()
        for name in ("novelty", "novelty_score", "code", "student_logits")
        if (value := getattr(output, name)) is not None and len(value) == len(logits)
    }
    return Answers(logits, labels, **extra)


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Join the answers to the parts of a batch; a column that some parts lack is None."""
    return Answers(*map(_join, zip(*parts, strict=True)))  # type: ignore[arg-type]


def _join(column: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in column if part is not None]
    if len(present) < len(column):
        return None
    return present[0] if len(present) == 1 else torch.cat(present)
