"""A model's member logits of a labelled batch, checked against the labels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..data.running import call_model, member_logits_of, split_batch
from ..errors import DataError


class MemberLogits(nn.Module):
    """A model as a function from a batch to member logits `[B, M, C]`.

    accelerate replaces the `forward` of what it prepares: here that leaves the model's own alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        of_members = getattr(self.model, "member_logits", None)
        if callable(of_members):  # a fused ensemble: its `logits` are the members' mean already
            return of_members(batch)
        return member_logits_of(call_model(self.model, batch))


def logits_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return float32 logits `[B, M, C]` and checked labels `[B]` or `[B, C]` of a batch."""
    _, _, labels = split_batch(batch)
    if labels is None:
        raise DataError("A batch has no labels. Give (inputs, labels), or dicts with 'labels'.")
    logits = model(batch).float()
    if len(labels) != len(logits):
        raise DataError(f"A batch has {len(labels)} labels for {len(logits)} answers.")
    if labels.is_floating_point():
        return logits, _probabilities(labels, logits.shape[-1]).to(logits)
    if labels.min() < 0 or labels.max() >= logits.shape[-1]:
        raise DataError(
            f"Labels run from {labels.min()} to {labels.max()}, but the model has "
            f"{logits.shape[-1]} classes. Number the classes from 0."
        )
    return logits, labels.long().to(logits.device)


def _probabilities(labels: Tensor, classes: int) -> Tensor:
    """Return soft labels `[B, C]` (a teacher's answers, for example); raise if they are not."""
    if labels.shape[1:] != (classes,):
        raise DataError(
            f"Labels of type {labels.dtype} have shape {list(labels.shape)}. Expected class "
            f"numbers [batch] as integers, or probabilities [batch, {classes}]."
        )
    if bool((labels < 0).any()) or not bool(((labels.sum(1) - 1).abs() < 1e-2).all()):
        raise DataError("Labels [batch, class] are not probabilities. Pass softmax(logits).")
    return labels
