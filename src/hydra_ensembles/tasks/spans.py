"""Extractive question answering: where the answer starts and ends in a text, or that there is none.

A member's probability of a span is the softmax of start + end logits over all spans that can be an
answer; members are averaged. The span of token 0 alone means "no answer", as in SQuAD 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..prediction import Prediction
from ..registry import Registry
from ..task_predictions import SpanPrediction
from ..uncertainty import Score, as_member_logits, scale_logits
from ..uncertainty.scores import disagreement, entropy, msp, mutual_information
from .task import IGNORED, Facts, Task, tasks, wrong_shape

NO_ANSWER = 0
"""The token whose span means that the text does not answer."""
_NEVER = -1e4

span_scores: Registry[Score] = Registry("score of question answering")
"""Uncertainty scores by name: functions of logits of spans `[batch, member, span]` to `[batch]`."""
for _name, _score in {
    "msp": msp,
    "entropy": entropy,
    "mutual-information": mutual_information,
}.items():
    span_scores.register(_name)(_score)


def span_logits(outputs: Tensor, able: Tensor, *, most: int) -> Tensor:
    """Return start + end logits of all spans, flat over start and end, `[batch, member, T * T]`.

    Args:
        outputs: Start and end logits, `[batch, member, 2, T]`.
        able: Which tokens may be part of an answer, bool `[batch, T]`.
        most: Most tokens of an answer.
    """
    sums = outputs[:, :, 0, :, None] + outputs[:, :, 1, None, :]
    both = able[:, :, None] & able[:, None, :]
    length = torch.arange(outputs.shape[-1], device=outputs.device)
    ahead = length[None, :] - length[:, None]
    valid = both & (ahead >= 0) & (ahead < most)
    valid[:, NO_ANSWER, NO_ANSWER] = True
    return sums.masked_fill(~valid[:, None], _NEVER).flatten(2)


@tasks.register("question-answering")
@dataclass(frozen=True)
class Spans(Task):
    """The most probable span answers; the loss is the mean cross-entropy of start and end.

    Attributes:
        most: Most tokens of an answer.
    """

    name: ClassVar[str] = "question-answering"
    title: ClassVar[str] = "question answering"
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (("start_logits", "end_logits"),)
    axes: ClassVar[int] = 3
    prediction: ClassVar[type[Prediction]] = SpanPrediction
    scores: ClassVar[Registry[Score]] = span_scores
    default_score: ClassVar[str] = "msp"
    has_temperatures: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    sets: ClassVar[tuple[str, ...]] = ("lac",)

    most: int = 30

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task by the name of the class."""
        return cls() if "ForQuestionAnswering" in facts.name else None

    def answer(
        self,
        outputs: Tensor,
        /,
        *,
        score: str | Score = "msp",
        temperature: float | Tensor | None = None,
        member_temperatures: Sequence[float] | Tensor | None = None,
        logit_scale: float | Tensor | None = None,
        class_names: Sequence[str] | None = None,
        student_logits: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Prediction:
        """Turn start and end logits `[batch, member, 2, token]` into spans."""
        shared = temperature if student_logits is None else None
        logits = scale_logits(outputs, temperature=shared, member_temperatures=member_temperatures)
        answering = logits
        if student_logits is not None:
            answering = scale_logits(student_logits[:, None], temperature=temperature)
        read = inputs or {}
        able = answer_tokens(outputs, read)
        spans = span_logits(logits, able, most=self.most)
        judged = spans
        if student_logits is not None:
            judged = span_logits(answering, able, most=self.most)
        probabilities = judged.softmax(-1).mean(1)
        tokens = outputs.shape[-1]
        # by start, then by end: without a division, which cannot be exported for any length
        by_start, ends = probabilities.unflatten(-1, (tokens, tokens)).max(-1)
        confidence, start = by_start.max(-1)
        return SpanPrediction(
            start=start,
            end=ends.gather(1, start[:, None])[:, 0],
            confidence=confidence,
            no_answer=probabilities[:, NO_ANSWER],
            uncertainty=self.score(spans if score == "mutual-information" else judged, score),
            mutual_information=mutual_information(spans),
            disagreement=disagreement(spans).float(),
            able=able,
            member_logits=logits,
            score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
            student_logits=None if student_logits is None else answering[:, 0],
            offsets=read.get("offset_mapping"),
            texts=read.get("texts"),
        )

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the logs of the members' mean start and end probabilities, `[batch, 2, token]`."""
        logs = as_member_logits(outputs).log_softmax(-1)
        return logs.logsumexp(1) - math.log(logs.shape[1])

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of start and end, `[batch]`, without what was cut off."""
        labels = self._inside(outputs, labels)
        losses = F.cross_entropy(
            outputs.float().transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
        )
        return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the losses of start and end, each over the texts that hold it."""
        labels = self._inside(outputs, labels)
        both = [
            F.cross_entropy(outputs[:, place], labels[:, place], ignore_index=IGNORED)
            for place in (0, 1)
        ]
        return (both[0] + both[1]) / 2

    def _inside(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return positions; -100 where the text was cut before it, as transformers ignores it."""
        labels = labels.to(outputs.device).long().clamp_min(0)
        return labels.masked_fill(labels >= outputs.shape[-1], IGNORED)

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return the positions of the first and last token, `[example, 2]`."""
        labels = labels.detach().cpu()
        if labels.is_floating_point() or labels.ndim != 2 or labels.shape[1] != 2:
            expected = "start_positions and end_positions, whole numbers [batch] each"
            raise wrong_shape(self, labels, where, expected)
        return labels.long()

    def errors(self, answer: Prediction, labels: Tensor) -> Tensor | None:
        """Tell where the span is not the label, bool `[batch]`."""
        found = torch.stack([answer.start, answer.end], 1)
        return (found != labels.to(found.device)).any(1)

    def examples(
        self, outputs: Tensor, labels: Tensor | None, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits in which only tokens that can answer, and token 0, have a chance."""
        able = answer_tokens(outputs, inputs)
        able[:, NO_ANSWER] = True
        return outputs.masked_fill(~able[:, None, None], _NEVER), labels

    def score(self, outputs: Tensor, score: str | Score) -> Tensor:
        """Return an uncertainty of the logits of spans, or of starts and ends, `[batch]`."""
        if outputs.ndim == 4:
            able = torch.ones_like(outputs[:, 0, 0], dtype=torch.bool)
            outputs = span_logits(outputs, able, most=self.most)
        return super().score(outputs, score)


def answer_tokens(outputs: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Return which tokens may be part of an answer, bool `[batch, token]`: those of the context.

    Known from `sequence_ids` (1 is the context), else from `token_type_ids` where they differ, else
    all real tokens but the first.
    """
    shape = (outputs.shape[0], outputs.shape[-1])
    real = inputs.get("attention_mask")
    able = torch.ones(shape, dtype=torch.bool, device=outputs.device)
    if isinstance(real, Tensor) and real.shape == shape:
        able = real.bool().to(outputs.device)
    second = inputs.get("sequence_ids")
    if not isinstance(second, Tensor):
        types = inputs.get("token_type_ids")
        second = types if isinstance(types, Tensor) and bool(types.any()) else None
        if second is not None:  # the separator after the context has its type too
            last = able.int().cumsum(1).argmax(1, keepdim=True)
            able = able.scatter(1, last, False)
    if second is not None and second.shape == shape:
        able = able & (second.to(outputs.device) == 1)
    able[:, NO_ANSWER] = False
    return able
