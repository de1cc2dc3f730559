"""Proposition 1, measured: does pruning hurt shifted data more than clean data?

DeltaL(theta) = L_shifted(theta) - L_clean(theta). The proposition (Hydra Ensembles, arXiv
2510.18358): if grad L_train = 0, grad L_shifted . d >= 0 and H_shifted - H_clean > 0, then
DeltaL(theta) <= DeltaL(theta + d). Here d zeroes the columns of W_O that read the pruned heads.
Moving along d is closing the gates of these heads, theta + t d = gates 1 - t, so grad L . d and
d^T H d are the first and second derivative of a sample's loss in one number t, which are taken
exactly by differentiating twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._records import to_record
from ..criteria.criterion import Loss, sample_losses
from ..data.batches import split_batch
from ..data.eval_mode import evaluating
from ..data.model_runs import output_of
from ..data.progress import progress_bar
from ..errors import DataError, UnsupportedModelError
from ..heads.gates import gate
from ..heads.head_mask import HeadMask, check_fits
from ..hosts import HostModel, host_model


@dataclass(frozen=True)
class LossAlongPruning:
    """The loss of one data set on the way from the whole model to the pruned one.

    Means over samples, each with its standard error: `before`, `after`; `gradient` = grad L . d;
    `curvature` = d^T H d. `remainder` = after - before - gradient - curvature / 2: what second
    order leaves.
    """

    examples: int
    before: float
    after: float
    gradient: float
    curvature: float
    remainder: float
    before_error: float
    after_error: float
    gradient_error: float
    curvature_error: float


@dataclass(frozen=True)
class ShiftGap:
    """Proposition 1 on a model, a mask and two data sets.

    Attributes:
        clean, shifted: The losses along the pruning (see `LossAlongPruning`).
        gap_before: L_shifted - L_clean of the whole model.
        gap_after: The same of the pruned model.
        gap_change: gap_after - gap_before, >= 0 where the proposition's conclusion holds.
        gap_change_error: Its standard error, paired by sample where both sets have equally many.
        gradient_term: (grad L_shifted - grad L_clean) . d.
        curvature_term: d^T (H_shifted - H_clean) d / 2.
        remainder: gap_change - gradient_term - curvature_term.
        stationary: First premise along d: grad L_clean . d is within two standard errors of 0.
        shifted_gradient_not_negative: Second premise: grad L_shifted . d >= 0.
        curvature_grows: Third premise along d: d^T (H_shifted - H_clean) d > 0.
        conclusion: gap_change >= 0.
        pruned_heads: Number of heads that go.
    """

    clean: LossAlongPruning
    shifted: LossAlongPruning
    gap_before: float
    gap_after: float
    gap_change: float
    gap_change_error: float
    gradient_term: float
    curvature_term: float
    remainder: float
    stationary: bool
    shifted_gradient_not_negative: bool
    curvature_grows: bool
    conclusion: bool
    pruned_heads: int

    def __str__(self) -> str:
        def yes(flag: bool) -> str:
            return "holds" if flag else "does not hold"

        return "\n".join(
            [
                f"ShiftGap: {self.pruned_heads} heads pruned",
                f"  gap before   {self.gap_before:+.4f}   (L_shifted - L_clean)",
                f"  gap after    {self.gap_after:+.4f}",
                f"  change       {self.gap_change:+.4f} ± {1.96 * self.gap_change_error:.4f} = "
                f"gradient {self.gradient_term:+.4f}, curvature {self.curvature_term:+.4f}, "
                f"remainder {self.remainder:+.4f}",
                f"  premises     grad L_clean.d = {self.clean.gradient:+.4f} is 0: "
                f"{yes(self.stationary)}",
                f"               grad L_shifted.d = {self.shifted.gradient:+.4f} >= 0: "
                f"{yes(self.shifted_gradient_not_negative)}",
                f"               d'(H_shifted - H_clean)d = {2 * self.curvature_term:+.4f} > 0: "
                f"{yes(self.curvature_grows)}",
                f"  conclusion   the gap grows: {yes(self.conclusion)}",
            ]
        )

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the record as JSON text; write it to `path` (beside, then renamed) when given."""
        return to_record("ShiftGap", asdict(self), path)


def pruning_shift_gap(
    model: nn.Module | HostModel,
    mask: HeadMask,
    clean: Iterable[Any],
    shifted: Iterable[Any],
    *,
    loss: Loss | None = None,
    progress: bool = True,
) -> ShiftGap:
    """Measure Proposition 1: the gap between shifted and clean loss, before and after pruning.

    Example:
        >>> print(pruning_shift_gap(model, mask, test, corrupted(test, "contrast")))

    Args:
        model: The host model, whole.
        mask: Heads to keep; the others are the direction d.
        clean: Labelled data.
        shifted: The same under a shift. With the same examples in the same order the gap's standard
            error is that of paired differences, and much smaller.
        loss: See `score_heads`; cross-entropy by default.
        progress: Show bars on a terminal.

    Returns:
        `ShiftGap`, with both losses before and after, the gradient and curvature terms, what second
        order leaves, and whether each premise holds.
    """
    host = host_model(model)
    check_fits(mask, host)
    options: dict[str, Any] = {"loss": loss, "progress": progress}
    before = _along(host, mask, clean, name="clean", **options)
    after = _along(host, mask, shifted, name="shifted", **options)
    c, s = _summary(before), _summary(after)
    changes = [values[1] - values[0] for values in (before, after)]
    if len(changes[0]) == len(changes[1]):
        error = _error(changes[1] - changes[0])
    else:
        error = math.hypot(_error(changes[0]), _error(changes[1]))
    change = (s.after - s.before) - (c.after - c.before)
    gradient, curvature = s.gradient - c.gradient, (s.curvature - c.curvature) / 2
    return ShiftGap(
        clean=c,
        shifted=s,
        gap_before=s.before - c.before,
        gap_after=s.after - c.after,
        gap_change=change,
        gap_change_error=error,
        gradient_term=gradient,
        curvature_term=curvature,
        remainder=change - gradient - curvature,
        stationary=abs(c.gradient) <= 2 * c.gradient_error,
        shifted_gradient_not_negative=s.gradient >= 0,
        curvature_grows=curvature > 0,
        conclusion=change >= 0,
        pruned_heads=sum(mask.shape) - mask.total_kept,
    )


def _along(
    host: HostModel,
    mask: HeadMask,
    data: Iterable[Any],
    *,
    name: str,
    loss: Loss | None,
    progress: bool,
) -> Tensor:
    """Return before, after, first and second derivative of every sample: [4, example]."""
    parts = []
    with evaluating(host.model):
        for batch in progress_bar(data, description=name, enabled=progress):
            first, second, before = _derivatives(host, mask, batch, loss)
            with gate(host, mask):
                after = _losses(host, batch, loss)
            rows = (before, after, first, second)
            parts.append(torch.stack([row.detach().double().cpu() for row in rows]))
    if not parts:
        raise DataError(f"The {name} data is empty: it gave no batch.")
    return torch.cat(parts, 1)


def _derivatives(
    host: HostModel, mask: HeadMask, batch: Any, loss: Loss | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate each sample's loss twice in how far its pruned heads are closed, at 0."""
    args, kwargs, _ = split_batch(batch)
    size = next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    if mask.total_kept == sum(mask.shape):  # nothing goes: the direction is zero
        before = _losses(host, batch, loss)
        return torch.zeros_like(before), torch.zeros_like(before), before
    device: Any = host.sites[0].output.weight.device
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused kernels derive only once
        closed = torch.zeros(size, 1, device=device, requires_grad=True)
        goes = [(~row).to(device=device, dtype=closed.dtype) for row in mask]
        with gate(host, [1 - closed * row if bool(row.any()) else None for row in goes]):
            before = _losses(host, batch, loss)
        (first,) = torch.autograd.grad(before.sum(), closed, create_graph=True)
        try:
            (second,) = torch.autograd.grad(first.sum(), closed)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{host.name} cannot be differentiated twice ({error}). Load it with "
                'attn_implementation="eager" or "sdpa".'
            ) from error
    return first[:, 0], second[:, 0], before


def _losses(host: HostModel, batch: Any, loss: Loss | None) -> Tensor:
    _, kwargs, labels = split_batch(batch)
    logits = output_of(host.model, batch)
    return sample_losses(logits, labels, host, loss=loss, padding=kwargs.get("attention_mask"))


def _summary(values: Tensor) -> LossAlongPruning:
    before, after, gradient, curvature = (float(row.mean()) for row in values)
    errors = [_error(row) for row in values]
    return LossAlongPruning(
        examples=values.shape[1],
        before=before,
        after=after,
        gradient=gradient,
        curvature=curvature,
        remainder=after - before - gradient - curvature / 2,
        before_error=errors[0],
        after_error=errors[1],
        gradient_error=errors[2],
        curvature_error=errors[3],
    )


def _error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
