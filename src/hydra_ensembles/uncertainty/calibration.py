"""Temperatures that calibrate an ensemble."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..errors import DataError
from .scores import as_member_logits, log_mean_probability


def fit_temperature(
    member_logits: Tensor, labels: Tensor, *, bounds: tuple[float, float] = (0.02, 50.0)
) -> float:
    """Find the one temperature for every member that minimises the NLL of the mean probability.

    argmin_T mean_x -log mean_m softmax(z_m(x) / T)_y, by a grid in log T refined with golden
    sections: deterministic, no gradients, no starting point (Guo et al., 2017).

    Args:
        member_logits: `[batch, member, class]`, held-out examples.
        labels: `[batch]`.
        bounds: the lowest and the highest temperature to consider.
    """
    logits = as_member_logits(member_logits).detach()
    if not len(logits) or labels.shape != logits.shape[:1]:
        raise DataError(
            f"Cannot fit a temperature: {len(logits)} examples of logits, labels of shape "
            f"{list(labels.shape)}. Give one label for each of at least one example."
        )
    if not bool(logits.amax(-1).isfinite().all()):
        raise DataError("Cannot fit a temperature: the logits hold NaN or infinity.")
    target = labels.to(logits.device).long()[:, None]

    def nll(log_temperature: float) -> float:
        logs = log_mean_probability(logits / math.exp(log_temperature))
        return -float(logs.gather(-1, target).double().mean())

    return math.exp(_golden_minimum(nll, math.log(bounds[0]), math.log(bounds[1])))


def fit_member_temperatures(
    member_logits: Tensor, labels: Tensor, *, bounds: tuple[float, float] = (0.02, 50.0)
) -> list[float]:
    """Find each member's own temperature, one for each member.

    Calibrated members pool into an under-confident mean (Rahaman & Thiery, 2021): fit one
    temperature on the scaled logits afterwards.
    """
    logits = as_member_logits(member_logits)
    return [fit_temperature(member, labels, bounds=bounds) for member in logits.unbind(1)]


def _golden_minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimise on [low, high]: the best cell of a grid, then golden sections to 1e-5."""
    grid = [low + (high - low) * i / 24 for i in range(25)]
    values = [function(x) for x in grid]
    best = values.index(min(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-5:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2
