"""Temperatures that calibrate an ensemble and cannot collapse.

A temperature that only follows the likelihood goes to its bound when every example is right (any
sharper answer is better) and follows one confident error when examples are few. So the fit is
cautious, by four rules:

1. *A prior.* The sum of the NLL is joined with |log T| / LAPLACE + (log T)^2 / (2 GAUSS^2): a
   temperature leaves 1 only where the examples together ask for it and goes far only where they
   insist; once they are many the prior says nothing.
2. *Never one example.* The fit is repeated without the example that pulls hardest away from 1; the
   answer nearer to 1 counts, and 1 itself where the two lie on different sides of it.
3. *Support.* Fewer than LEAST examples, or none that is wrong, support no temperature: it is 1.
4. *A warning* whenever rule 3 or a bound decides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError
from .scores import as_member_logits, log_mean_probability, nll_of

LAPLACE, GAUSS = 0.35, 0.5
"""Scales of the prior on log T; chosen by `experiments/calibration_draws.py`."""
LEAST = 20
"""Examples without which no temperature is fitted."""
BOUNDS = (0.02, 50.0)


class CalibrationWarning(UserWarning):
    """The examples do not support a temperature, or it lies at a bound."""


@dataclass(frozen=True)
class TemperatureFit:
    """A temperature, and why it was not simply fitted (empty when it was)."""

    temperature: float
    note: str = ""


def fit_temperature(member_logits: Tensor, labels: Tensor, *, prior: float = 1.0) -> float:
    """Find one temperature for all members: low NLL of the mean probability, cautiously.

    argmin_T sum_x -log mean_m softmax(z_m(x) / T)_y + prior(log T) (Guo et al., 2017, with a
    prior; the formula is above), without resting on one example; 1, with a `CalibrationWarning`,
    where the examples support no temperature. Deterministic, no gradients, no starting point.

    Args:
        member_logits: `[batch, member, class]`, held-out examples.
        labels: `[batch]`; or 0 and 1 for each of several labels, `[batch, label]`.
        prior: weight of the prior; 0 for maximum likelihood without any caution.
    """
    found = find_temperature(member_logits, labels, prior=prior)
    if found.note:
        warnings.warn(found.note, CalibrationWarning, stacklevel=2)
    return found.temperature


def fit_member_temperatures(
    member_logits: Tensor, labels: Tensor, *, prior: float = 1.0
) -> list[float]:
    """Find each member's own temperature.

    Calibrated members pool into an under-confident mean (Rahaman & Thiery, 2021): fit one
    temperature on the scaled logits afterwards.
    """
    logits = as_member_logits(member_logits)
    return [fit_temperature(member, labels, prior=prior) for member in logits.unbind(1)]


def find_temperature(
    member_logits: Tensor, labels: Tensor, *, prior: float = 1.0
) -> TemperatureFit:
    """Find what `fit_temperature` finds; return notes in place of warnings."""
    logits = as_member_logits(member_logits).detach()
    shape = (len(logits), logits.shape[-1])[: labels.ndim]
    if not len(logits) or labels.shape != shape or not shape:
        raise DataError(
            f"Cannot fit a temperature: {len(logits)} examples of logits, labels of shape "
            f"{list(labels.shape)}. Give one label for each of at least one example."
        )
    if not bool(logits.amax(-1).isfinite().all()):
        raise DataError("Cannot fit a temperature: the logits hold NaN or infinity.")
    target = labels.to(logits.device)
    if prior:
        if len(logits) < LEAST:
            return TemperatureFit(
                1.0,
                f"The temperature stays at 1: {len(logits)} examples are too few to fit it (at "
                f"least {LEAST}).",
            )
        right = (
            log_mean_probability(logits).argmax(-1) == target
            if labels.ndim == 1
            else (logits.sigmoid().mean(1) >= 0.5) == target.bool()
        )
        if bool(right.all()):
            return TemperatureFit(
                1.0,
                f"The temperature stays at 1: all {len(logits)} examples are right, so the data "
                "cannot tell how sure is too sure. Give more examples.",
            )

    def nll(log_temperature: float, logits: Tensor, target: Tensor) -> Tensor:
        labels_each = 1 if target.ndim == 1 else target.shape[1]  # `nll_of` averages over labels
        return labels_each * nll_of(logits / math.exp(log_temperature), target).double()

    def loss(log_temperature: float) -> float:
        held = abs(log_temperature) / LAPLACE + log_temperature**2 / (2 * GAUSS**2)
        return float(nll(log_temperature, logits, target).sum()) + prior * held

    low, high = math.log(BOUNDS[0]), math.log(BOUNDS[1])
    best = minimum(loss, low, high)
    if prior and best:
        away = math.copysign(1e-3, best)
        pull = nll(best + away, logits, target) - nll(best - away, logits, target)
        hardest = torch.arange(len(logits), device=logits.device) != pull.argmin()
        logits, target = logits[hardest], target[hardest]
        again = minimum(loss, *sorted((0.0, best)))
        best = min(best, again, key=abs)
    if min(best - low, high - best) < 1e-3:
        return TemperatureFit(
            math.exp(best),
            f"The temperature {math.exp(best):.3g} is at its bound: the logits are on another "
            "scale, or the labels do not belong to these examples.",
        )
    return TemperatureFit(math.exp(best))


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimise on [low, high]: the best cell of a grid, then golden sections; 0 where it is best.

    A prior has its corner at 0, which sections come near to but never meet.
    """
    grid = [low + (high - low) * i / 16 for i in range(17)]
    values = [function(x) for x in grid]
    best = values.index(min(values))
    left_edge, right_edge = grid[max(best - 1, 0)], grid[min(best + 1, 16)]
    ratio = (math.sqrt(5) - 1) / 2
    low, high = left_edge, right_edge
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-4:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    found = (low + high) / 2
    return 0.0 if left_edge <= 0.0 <= right_edge and function(0.0) <= function(found) else found
