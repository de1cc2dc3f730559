"""One class per input: softmax, cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..prediction import ClassPrediction, Prediction
from ..registry import Registry
from ..uncertainty import (
    Score,
    as_member_logits,
    log_mean_probability,
    predict_from_logits,
    score_logits,
    scores,
)
from ..uncertainty.scores import per_text
from .task import IGNORED, Facts, Task, tasks, wrong_shape


@tasks.register("multi-class")
@dataclass(frozen=True)
class MultiClass(Task):
    """Members' softmax is averaged; the loss is the cross-entropy of the mean."""

    name: ClassVar[str] = "multi-class"
    title: ClassVar[str] = "classification, one class per input"
    prediction: ClassVar[type[Prediction]] = ClassPrediction
    scores: ClassVar[Registry[Score]] = scores
    default_score: ClassVar[str] = "msp"
    classifies: ClassVar[bool] = True
    has_temperatures: ClassVar[bool] = True
    calibrators: ClassVar[Mapping[str, str]] = {
        "vector": "vector scaling",
        "isotonic": "isotonic regression of the top label",
    }
    sets: ClassVar[tuple[str, ...]] = ("lac", "aps", "raps")

    answer = staticmethod(predict_from_logits)
    novelty_rows = staticmethod(per_text)
    member_outputs = staticmethod(as_member_logits)

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return None: this is the task of every model that has no other."""
        return None

    def mean(self, outputs: Tensor) -> Tensor:
        """Return log mean_m softmax(z_m), `[batch, class]`."""
        return log_mean_probability(outputs)

    def target(self, outputs: Tensor) -> Tensor:
        """Return the softmax of logits: labels that are probabilities."""
        return outputs.softmax(-1)

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each example, `[batch]`."""
        return F.cross_entropy(outputs.float(), labels.to(outputs.device), reduction="none")

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over labels that are not -100."""
        return F.cross_entropy(outputs.flatten(0, -2), labels.to(outputs.device).flatten())

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return whole class numbers `[example]`."""
        labels = labels.detach().cpu()
        whole = not labels.is_floating_point()
        # several yes or no labels of one example have neither ignored ones nor other classes
        if labels.ndim == 2 and whole and bool(((labels == IGNORED) | (labels > 1)).any()):
            raise DataError(
                f"Labels of shape {list(labels.shape)} in {where} are one per token, but the "
                "search needs one label per example. For token classification choose heads by "
                "score_heads(model, data).top_k(0.5), one mask per member, and fuse() them."
            )
        if not whole or labels.ndim != 1:
            raise wrong_shape(self, labels, where, "one whole class number per example")
        labels = labels.long()
        outside = labels[labels < 0] if size is None else labels[(labels < 0) | (labels >= size)]
        if len(outside):
            known = "" if size is None else f": the model has {size} classes, 0 to {size - 1}"
            raise DataError(f"Label {int(outside[0])} in {where} is out of range{known}.")
        return labels

    def errors(self, answer: Prediction, labels: Tensor) -> Tensor | None:
        """Tell where the predicted class is not the label, bool `[batch]`."""
        return torch.as_tensor(answer.class_index != labels.to(answer.class_index.device))

    def score(self, outputs: Tensor, score: str | Score) -> Tensor:
        """Return an uncertainty of member logits, `[batch]`."""
        return score_logits(outputs, score)

    def examples(
        self, outputs: Tensor, labels: Tensor | None, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return one example per input; per real, labelled token where the model gives tokens."""
        by_token = outputs.ndim == 4
        if outputs.ndim == 3:  # one model's [batch, token, class], or members without tokens
            by_token = self.by_token if labels is None else labels.shape == outputs.shape[:2]
            outputs = outputs[:, None] if by_token else outputs
        if not by_token:
            return outputs, labels
        mask, shape = inputs.get("attention_mask"), (outputs.shape[0], outputs.shape[2])
        real = torch.ones(shape, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == shape:
            real = mask.cpu().bool()
        if labels is not None:
            if labels.shape != shape:
                raise DataError(
                    f"Labels of shape {list(labels.shape)} for {shape[1]} tokens of {shape[0]} "
                    "texts: expected one label per token, -100 for tokens to ignore."
                )
            labels = labels.cpu()
            real &= labels != IGNORED
            labels = labels[real]
        return outputs.transpose(1, 2)[real], labels
