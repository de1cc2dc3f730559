"""Losses of members that learn from teachers' answers, mixed with those of the labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..tasks import Task
from ..uncertainty import log_mean_probability
from .settings import Settings


def taught_losses(
    task: Task, settings: Settings, target: Tensor, outputs: Tensor, labels: Any
) -> Tensor:
    """Return each member's loss, mixed with a `joint` share of the mean's, `[batch, member]`.

    Args:
        task: What outputs mean.
        settings: `distill`, `joint`, `teacher_temperature` and `label_smoothing` count.
        target: What the teachers answer to each member, as `Task.target` gives it, `[batch, member,
            ...]`.
        outputs: The members' outputs, `[batch, member, ...]`.
        labels: The batch's labels; None to learn from the teachers only.
    """
    temperature, joint = settings.teacher_temperature, settings.joint
    alone = not joint or outputs.shape[1] == 1  # one member is its own mean
    if not task.classifies:
        members = zip(outputs.unbind(1), target.unbind(1), strict=True)
        losses = torch.stack([_mixed(task, settings, own, aim, labels) for own, aim in members], 1)
        if alone:
            return losses
        mean = _mixed(task, settings, task.mean(outputs), target.mean(1), labels)[:, None]
        return (1 - joint) * losses + joint * mean
    softened = (outputs / temperature).log_softmax(-1)
    losses = _cross_entropy(settings, target, softened, outputs, labels)
    if alone:
        return losses
    mean = _cross_entropy(
        settings,
        target.mean(1, keepdim=True),
        log_mean_probability(outputs / temperature)[:, None],
        log_mean_probability(outputs)[:, None],
        labels,
    )
    return (1 - joint) * losses + joint * mean


def _mixed(task: Task, settings: Settings, own: Tensor, aim: Tensor, labels: Any) -> Tensor:
    """Mix the task's losses against a teacher and against the labels, `[batch]`."""
    soft = task.losses(own, aim)
    if settings.distill == 1 or labels is None:
        return soft
    checked = task.check_labels(labels, "the data", size=own.shape[-1])
    return settings.distill * soft + (1 - settings.distill) * task.losses(own, checked)


def _cross_entropy(
    settings: Settings, target: Tensor, answer: Tensor, logits: Tensor, labels: Any
) -> Tensor:
    """Mix the loss of softened answers (log-probabilities) with that of the labels."""
    losses = -(target * answer).sum(-1) * settings.teacher_temperature**2
    share = settings.distill
    if share == 1 or labels is None:
        return losses
    labels = check_labels(labels, share, logits.shape[-1])
    labels = labels.to(logits.device).long()[:, None].expand(losses.shape)
    hard = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=settings.label_smoothing
    )
    return share * losses + (1 - share) * hard


def check_labels(labels: Tensor | None, share: float, classes: int | None = None) -> Tensor:
    """Return labels that a loss can be mixed with, else raise."""
    mixed = f"distill={share:g} makes {1 - share:.2g} of the target the label, but"
    otherwise = "Fix the labels, or pass Settings(distill=1.0) to learn from the teachers only."
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
