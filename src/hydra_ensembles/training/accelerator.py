"""The gradients of one step, computed from parts of a batch that processes may share.

One run under accelerate, whose process-wide state is put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data import processes
from ..data.batches import split_batch
from ..data.model_runs import call_model, member_logits_of
from ..errors import DataError, HydraError, MissingDependencyError


@contextlib.contextmanager
def accelerator(mixed_precision: str) -> Iterator[Any]:
    """Yield an `Accelerator`; afterwards put accelerate's process-wide state back."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError(
            "Training needs accelerate. Install it with: pip install 'hydra-ensembles[train]'."
        ) from error
    processes.size()  # before accelerate does: the process group must also carry CPU tensors
    # once a state exists, its precision holds for the whole process: never change a user's
    foreign = AcceleratorState._shared_state.get("_mixed_precision")
    if foreign is not None and foreign != mixed_precision:
        raise HydraError(
            f"This process already runs accelerate with mixed_precision={foreign!r}, "
            f"but {mixed_precision!r} was asked for. Pass mixed_precision={foreign!r}."
        )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield Accelerator(mixed_precision=mixed_precision)
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
        self._found: dict[int, list[Tensor | None]] = {}

    def take_(self, part: int) -> None:
        """Move the gradients that a part left on the parameters into this object."""
        self._found[part] = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def put_(self) -> None:
        """Set the parameters' gradients to the sum over all parts of all processes."""
        used = torch.zeros(len(self.parameters))
        for row in self._found.values():
            used += torch.tensor([grad is not None for grad in row], dtype=torch.float32)
        processes.sum_over([used])
        trained = [p for p, count in zip(self.parameters, used.tolist(), strict=True) if count]
        flat = {part: self._flat(row, used) for part, row in self._found.items()}
        self._found = {}
        if not trained:
            return
        total = self._in_order(flat, trained) if self.ordered else self._at_once(flat, trained)
        sizes = [parameter.numel() for parameter in trained]
        for parameter, grad in zip(trained, total.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)

    def _flat(self, row: Sequence[Tensor | None], used: Tensor) -> Tensor:
        """Return a part's gradients as one vector, zero where only other parts have gradients."""
        pieces = [
            (torch.zeros_like(parameter) if grad is None else grad).reshape(-1)
            for parameter, grad, count in zip(self.parameters, row, used.tolist(), strict=True)
            if count
        ]
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _in_order(self, flat: dict[int, Tensor], trained: Sequence[nn.Parameter]) -> Tensor:
        several = processes.size()
        total: Tensor | None = None
        for part in range(self.parts):
            grad = flat.pop(part) if part in flat else _empty(trained)
            processes.broadcast(grad, part % several)
            total = grad if total is None else total + grad
        assert total is not None
        return total

    def _at_once(self, flat: dict[int, Tensor], trained: Sequence[nn.Parameter]) -> Tensor:
        total = torch.stack(list(flat.values())).sum(0) if flat else _empty(trained).zero_()
        processes.sum_over([total])
        return total


def _empty(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([torch.empty_like(parameter).reshape(-1) for parameter in parameters])


# A model's member logits of a labelled batch, checked against the labels.
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
