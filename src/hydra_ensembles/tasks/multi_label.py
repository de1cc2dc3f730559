"""Any number of labels per input: one sigmoid per label, binary cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..prediction import Prediction
from ..registry import Registry
from ..task_predictions import MultiLabelPrediction
from ..uncertainty import Calibrator, Score, log_mean_sigmoid
from ..uncertainty.scores import calibrated_logits
from .task import Facts, Task, tasks, wrong_shape

label_scores: Registry[Score] = Registry("score of multi-label classification")
"""Uncertainty scores by name: functions of member logits `[batch, member, label]` to `[batch]`."""


def binary_entropy(probability: Tensor) -> Tensor:
    """Return the entropy of yes or no in nats, in the shape of the probabilities."""
    return torch.special.entr(probability) + torch.special.entr(1 - probability)


@label_scores.register("msp")
def any_wrong(member_logits: Tensor) -> Tensor:
    """Return the probability that some label is wrong, 1 - prod_l max(p_l, 1 - p_l), `[batch]`.

    Labels are taken as independent. Summed in logs: many sure labels keep their order.
    """
    positive, negative = log_mean_sigmoid(member_logits)
    return -torch.expm1(torch.maximum(positive, negative).sum(-1))


@label_scores.register("entropy")
def total_entropy(member_logits: Tensor) -> Tensor:
    """Return the entropies of the labels' mean probabilities in nats, summed, `[batch]`."""
    return binary_entropy(member_logits.sigmoid().mean(1)).sum(-1)


@label_scores.register("mutual-information")
def mutual_information(member_logits: Tensor) -> Tensor:
    """Return sum_l H(mean_m p_ml) - mean_m H(p_ml) in nats, `[batch]`, never below 0."""
    probabilities = member_logits.sigmoid()
    gap = binary_entropy(probabilities.mean(1)) - binary_entropy(probabilities).mean(1)
    return gap.sum(-1).clamp_min(0.0)


@label_scores.register("energy")
def joint_energy(member_logits: Tensor) -> Tensor:
    """Return mean_m -sum_l log(1 + exp(z_ml)), `[batch]` (JointEnergy, Wang et al., 2021)."""
    return -F.softplus(member_logits).sum(-1).mean(1)


@label_scores.register("max-logit")
def max_logit(member_logits: Tensor) -> Tensor:
    """Return -max_l mean_m z_ml, `[batch]` (Hendrycks et al., 2022)."""
    return -member_logits.mean(1).amax(-1)


@tasks.register("multi-label")
@dataclass(frozen=True)
class MultiLabel(Task):
    """Members' sigmoids are averaged; the loss is the binary cross-entropy of the means.

    Attributes:
        thresholds: The probability from which on each label is predicted; 0.5 for all without.
    """

    name: ClassVar[str] = "multi-label"
    title: ClassVar[str] = "multi-label classification"
    prediction: ClassVar[type[Prediction]] = MultiLabelPrediction
    scores: ClassVar[Registry[Score]] = label_scores
    default_score: ClassVar[str] = "msp"
    has_temperatures: ClassVar[bool] = True
    sets: ClassVar[tuple[str, ...]] = ("lac",)
    calibrators: ClassVar[Mapping[str, str]] = {"platt": "Platt scaling of each label"}

    thresholds: tuple[float, ...] = ()

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task where the config says so."""
        named = facts.problem == "multi_label_classification"
        return cls() if named and facts.classifies else None

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
        calibrator: Calibrator | None = None,
    ) -> Prediction:
        """Turn member logits `[batch, member, label]` into labels, each with its probability."""
        logits, answering = calibrated_logits(
            outputs,
            student_logits,
            temperature=temperature,
            member_temperatures=member_temperatures,
            calibrator=calibrator,
        )
        probabilities = answering.sigmoid().mean(1)
        votes = logits.sigmoid() >= self._thresholds(logits)
        pairs = (votes[:, :, None] != votes[:, None]).double().mean((1, 2, 3))
        members = logits.shape[1]
        read = logits if score == "mutual-information" else answering
        return MultiLabelPrediction(
            probabilities=probabilities,
            active=probabilities >= self._thresholds(logits),
            label_uncertainty=binary_entropy(probabilities),
            uncertainty=self.score(read, score),
            mutual_information=mutual_information(logits),
            # over ordered pairs of different members
            disagreement=(pairs * members / max(members - 1, 1)).float(),
            member_logits=logits,
            score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
            class_names=class_names,
            student_logits=None if student_logits is None else answering[:, 0],
        )

    def _thresholds(self, logits: Tensor) -> Tensor:
        """Return the thresholds, `[label]`."""
        count = logits.shape[-1]
        if self.thresholds and len(self.thresholds) != count:
            raise DataError(f"{len(self.thresholds)} thresholds for {count} labels: give one each.")
        return logits.new_tensor(self.thresholds or [0.5] * count)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the logit of mean_m sigmoid(z_m), `[batch, label]`."""
        positive, negative = log_mean_sigmoid(outputs)
        return positive - negative

    def target(self, outputs: Tensor) -> Tensor:
        """Return the sigmoids of logits: labels that are probabilities."""
        return outputs.sigmoid()

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the binary cross-entropy, mean over labels, `[batch]`."""
        outputs = outputs.float()
        losses = F.binary_cross_entropy_with_logits(outputs, labels.to(outputs), reduction="none")
        return losses.mean(-1)

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return labels of 0 and 1 as numbers `[example, label]`."""
        labels = labels.detach().cpu().float()
        if labels.ndim != 2 or size not in (None, labels.shape[-1]):
            count = "one 0 or 1 for every label" if size is None else f"{size} values of 0 or 1"
            raise wrong_shape(self, labels, where, f"{count} of each example")
        if not bool(((labels >= 0) & (labels <= 1)).all()):
            raise DataError(
                f"Labels in {where} reach from {float(labels.min()):g} to {float(labels.max()):g}; "
                f"{self.title} expects 0 (no) and 1 (yes)."
            )
        return labels

    def errors(self, answer: Prediction, labels: Tensor) -> Tensor | None:
        """Tell where any label is wrong, bool `[batch]`."""
        wrong: Tensor = answer.active != labels.to(answer.active.device).bool()
        return wrong.any(-1)
