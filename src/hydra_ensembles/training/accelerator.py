"""A training run under accelerate: its state, gradients by parts, checked logits and labels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data import processes
from ..data.batches import split_batch
from ..data.model_runs import call_model, member_outputs_of
from ..errors import DataError, HydraError
from ..registry import imported
from ..tasks import IGNORED, Task, task_of

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextlib.contextmanager
def accelerator(mixed_precision: str) -> Iterator[Accelerator]:
    """Yield an `Accelerator`; afterwards put accelerate's process-wide state back."""
    accelerate = imported("accelerate", "Training", "train")
    AcceleratorState = accelerate.state.AcceleratorState

    processes.size()  # before accelerate does: the process group must also carry CPU tensors
    # once a state exists, its precision holds for the whole process: never change a user's
    foreign = AcceleratorState._shared_state.get("_mixed_precision")
    if foreign is not None and foreign != mixed_precision:
        raise HydraError(
            f"This process already runs accelerate with mixed_precision={foreign!r}, but "
            f"{mixed_precision!r} was asked for. Pass Settings(mixed_precision={foreign!r})."
        )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield accelerate.Accelerator(mixed_precision=mixed_precision)
    finally:
        if foreign is None:
            AcceleratorState._reset_state()


class Gradients:
    """Gradients of the parts of one batch.

    Process k mod n computes part k. The sum over all parts equals the whole batch's gradients, up
    to rounding. Summed in the order of the parts, it has the same bits for any number of processes.

    Args:
        parameters: The trained parameters.
        parts: Number of parts per batch.
        ordered: Sum the parts in order, at the price of one message per part.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int, *, ordered: bool) -> None:
        self.parameters, self.parts, self.ordered = list(parameters), parts, ordered
        self._rows: dict[int, Tensor] = {}

    def take_(self, part: int) -> None:
        """Move the gradients that a part left on the parameters into this object.

        They become one vector that ends with one number per parameter: 1 if it has a gradient.
        """
        used = [parameter.grad is not None for parameter in self.parameters]
        pieces = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in self.parameters
        ]
        self._rows[part] = torch.cat([*pieces, torch.tensor(used).to(pieces[0])])
        for parameter in self.parameters:
            parameter.grad = None

    def put_(self) -> None:
        """Set the parameters' gradients to the sum over all parts of all processes."""
        sizes = [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]
        like = torch.cat([parameter.detach().reshape(-1)[:1] for parameter in self.parameters])
        if self.ordered:
            total = like.new_zeros(sum(sizes))
            for part in range(self.parts):
                row = self._rows.pop(part, None)
                row = like.new_empty(sum(sizes)) if row is None else row
                processes.broadcast(row, part % processes.size())
                total += row
        else:
            rows = list(self._rows.values()) or [like.new_zeros(sum(sizes))]
            total = torch.stack(rows).sum(0)
            processes.sum_over([total])
        *gradients, used = total.split(sizes)
        for parameter, gradient, count in zip(
            self.parameters, gradients, used.tolist(), strict=True
        ):
            if count:  # without a gradient in any part, the optimizer must skip it
                parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


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
            logits: Tensor = of_members(batch)
            return logits
        return member_outputs_of(call_model(self.model, batch), task_of(self.model))


def logits_and_labels(
    model: nn.Module, batch: Any, task: Task | None = None
) -> tuple[Tensor, Tensor]:
    """Return a batch's float32 outputs `[B, M, ...]` and its checked labels.

    Labels of classes are numbers `[B]` or probabilities `[B, C]`, those of another task its own.
    """
    _, inputs, labels = split_batch(batch)
    if labels is None:
        raise DataError("A batch has no labels. Give (inputs, labels), or dicts with 'labels'.")
    logits = model(batch).float()
    if task is not None and (task.by_token or not task.classifies):
        size = None if task.ragged else logits.shape[-1]
        labels = task.check_labels(labels, "a batch", size=size).to(logits.device)
        mask = inputs.get("attention_mask")
        if task.by_token and isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(~mask.to(labels.device).bool(), IGNORED)
        return logits, labels
    if len(labels) != len(logits):
        raise DataError(f"A batch has {len(labels)} labels for {len(logits)} answers.")
    if labels.is_floating_point():
        if labels.shape != logits.shape[::2]:
            raise DataError(
                f"Labels of type {labels.dtype} have shape {list(labels.shape)}. Expected class "
                f"numbers [batch] as integers, or probabilities [batch, {logits.shape[-1]}]."
            )
        if bool((labels < 0).any()) or not bool(((labels.sum(1) - 1).abs() < 1e-2).all()):
            raise DataError("Labels [batch, class] are not probabilities. Pass softmax(logits).")
        return logits, labels.to(logits)
    if labels.min() < 0 or labels.max() >= logits.shape[-1]:
        raise DataError(
            f"Labels run from {labels.min()} to {labels.max()}, but the model has "
            f"{logits.shape[-1]} classes. Number the classes from 0."
        )
    return logits, labels.long().to(logits.device)
