"""The run of `distill`: every member against its own teacher, and their mean against the mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from .branch_run import BranchRun
from .sample_order import keys_of
from .teacher_answers import Answers
from .views import Lessons


@dataclass
class DistillRun(BranchRun):
    """A run in which every member has its own teacher."""

    lessons: Lessons | None = None
    answers: Answers | None = None
    shares: Tensor | None = None
    slow: frozenset[str] = frozenset()

    def _rate_of(self, name: str) -> float:
        return self.settings.trunk_rate if name in self.slow else 1.0

    def _remembered(self) -> Iterable[Any]:
        assert self.lessons is not None
        return self.lessons.numbered_views()

    def _loss(self, batch: Any, part: int) -> Tensor:
        batch, share = self._part(batch, part)
        loss = share * self._taught("data", self.epoch, batch) if share else torch.zeros(())
        if self.outliers is None:
            return loss
        outliers, share = self._part(self.outliers.at(self.step), part)
        if not share:
            return loss
        turn = self.outliers.turn(self.step)
        return loss + share * self.settings.outlier_weight * self._taught(
            "outliers", turn, outliers
        )

    def _taught(self, part: str, turn: int, batch: Any) -> Tensor:
        """Return the members' mean loss against their teachers on a view of a batch."""
        assert self.lessons is not None and self.answers is not None and self.shares is not None
        view = turn % self.answers.parts[part].views
        samples, temperature = batch["samples"], self.settings.teacher_temperature
        target = self.answers.rows(part, view, samples).to(self.accelerator.device)
        target = (target / temperature).softmax(-1)  # [batch, teacher, class]
        target = torch.einsum("mt,btc->bmc", self.shares.to(target), target)
        shown = {**batch, "samples": self.lessons.number(part, view, samples)}
        if not self.model.knows(keys_of(shown)):
            shown["batch"] = self.lessons.view_of(part, view, batch)
        logits = self.wrapped(shown).float()
        losses = self._losses(part, target, logits, batch)
        return self._weighted(losses, shown).mean()

    def _losses(self, part: str, target: Tensor, logits: Tensor, batch: Any) -> Tensor:
        """Return each member's loss: its own, mixed with a `joint` share of the mean's."""
        temperature, joint = self.settings.teacher_temperature, self.settings.joint
        losses = self._cross_entropy(
            part, target, (logits / temperature).log_softmax(-1), logits, batch
        )
        if not joint or logits.shape[1] == 1:  # one member is its own mean
            return losses
        mean_logits = log_mean(logits)[:, None]
        mean = self._cross_entropy(
            part,
            target.mean(1, keepdim=True),
            log_mean(logits / temperature)[:, None],
            mean_logits,
            batch,
        )
        return (1 - joint) * losses + joint * mean

    def _cross_entropy(
        self, part: str, target: Tensor, answer: Tensor, logits: Tensor, batch: Any
    ) -> Tensor:
        """Mix the loss of softened answers (log-probabilities) with that of the labels."""
        losses = -(target * answer).sum(-1) * self.settings.teacher_temperature**2
        share = self.settings.distill
        if share == 1 or part != "data":
            return losses
        labels = check_labels(batch["labels"], share, logits.shape[-1])
        labels = labels.to(logits.device).long()[:, None].expand(losses.shape)
        hard = F.cross_entropy(
            logits.transpose(1, 2),
            labels,
            reduction="none",
            label_smoothing=self.settings.label_smoothing,
        )
        return share * losses + (1 - share) * hard


def check_labels(labels: Tensor | None, share: float, classes: int | None = None) -> Tensor:
    """Return labels that a loss can be mixed with, else raise."""
    mixed = f"distill={share:g} makes {1 - share:.2g} of the target the label, but"
    otherwise = "Mend the labels, or pass Settings(distill=1.0) to learn from the teachers only."
    if labels is None:
        raise DataError(f"{mixed} the data has no labels. {otherwise}")
    if labels.is_floating_point() or labels.ndim != 1:
        raise DataError(
            f"{mixed} the labels are {labels.dtype} of shape {list(labels.shape)}; expected class "
            f"numbers [batch]. {otherwise}"
        )
    if classes is not None and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(
            f"{mixed} labels run from {labels.min()} to {labels.max()} and the model has {classes} "
            f"classes, numbered from 0. {otherwise}"
        )
    return labels


def log_mean(logits: Tensor) -> Tensor:
    """Return the log of the members' mean probability, `[batch, class]`."""
    return logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
