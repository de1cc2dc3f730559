"""Fit calibrators: vector and Platt scaling, isotonic regression of the top label, variances.

Each fit is deterministic and cautious: a prior keeps scaling near the temperatures that came
before, blocks of isotonic regression count their own confidence as one more example, and variances
have one number to search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .calibrators import Calibrator, PlattScaling, TopLabel, Variance, VectorScaling
from .scores import mean_probability, nll_of
from .temperatures import minimum

SCALE, SHIFT = 0.25, 0.5
"""Standard deviations of the priors on log scale and shift."""
LEAST = 100
"""Examples without which only temperatures and variances are fitted."""
EACH = 5
"""Examples per class without which no class has numbers of its own."""
POINTS = 16
"""Most points of isotonic regression."""


def fit_scale_shift(member_logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit vector scaling of classes `[batch]`, or Platt scaling of each label `[batch, label]`.

    argmin sum_x NLL(mean_m p_m(x), y) + sum_c (log a_c)^2 / (2 SCALE^2) + b_c^2 / (2 SHIFT^2), with
    logits a_c z_c + b_c: convex for one member, and started at the temperatures' answer.
    """
    logits = member_logits.detach().double()
    several = labels.shape[1] if labels.ndim == 2 else 1  # `nll_of` averages over labels
    width = logits.shape[-1]
    values = torch.zeros(2, width, dtype=torch.float64, requires_grad=True)
    steps = torch.optim.LBFGS([values], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        held = (values[0] / SCALE).square().sum() / 2 + (values[1] / SHIFT).square().sum() / 2
        total = several * nll_of(logits * values[0].exp() + values[1], labels).sum() + held
        total.backward()
        return total

    with torch.enable_grad():
        steps.step(loss)
    scale, shift = values.detach()
    kind = VectorScaling if labels.ndim == 1 else PlattScaling
    return kind(tuple(scale.exp().tolist()), tuple(shift.tolist()))


def fit_isotonic(member_logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit isotonic regression of being right on the confidence, by pooling adjacent violators."""
    confidence, predicted = mean_probability(member_logits.detach()).double().max(-1)
    confidence, order = confidence.sort(stable=True)
    correct = (predicted == labels)[order].double().tolist()
    blocks: list[tuple[float, float, int]] = []  # sums of confidence and of right ones, and count
    for at, hit in zip(confidence.tolist(), correct, strict=True):
        block = (at, hit, 1)
        while blocks and blocks[-1][1] / blocks[-1][2] >= block[1] / block[2]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    while len(blocks) > POINTS:  # join the smallest block with its smaller neighbour
        small = min(range(len(blocks)), key=lambda place: blocks[place][2])
        sides = [place for place in (small - 1, small + 1) if 0 <= place < len(blocks)]
        other = min(sides, key=lambda place: blocks[place][2])
        first = min(small, other)
        a, b = blocks[first : first + 2]
        blocks[first : first + 2] = [(a[0] + b[0], a[1] + b[1], a[2] + b[2])]
    points = [total / count for total, _, count in blocks]
    # its own confidence as one more example: never 0 or 1, and little where there are many
    shares = [(hits + at) / (n + 1) for (_, hits, n), at in zip(blocks, points, strict=True)]
    rising = torch.tensor(shares, dtype=torch.float64).cummax(0).values
    return TopLabel(tuple(points), tuple(rising.tolist()))


def fit_variance(
    member_values: Tensor, targets: Tensor, *, values: Tensor | None = None, spread: bool = True
) -> Variance:
    """Fit the variance of a normal distribution around the answer, number by number.

    The residual b has a closed form for each ratio r of the two parts, so only r is searched:
    b (1 + r s^2) with s^2 the members' variance.

    Args:
        member_values: `[batch, member, number]`.
        targets: `[batch, number]`.
        values: The answers; the members' mean by default.
        spread: Whether the members' spread counts; else the variance is the same everywhere.
    """
    members = member_values.detach().double()
    answer = members.mean(1) if values is None else values.detach().double()
    squared = (targets.double().reshape(answer.shape) - answer).square()
    variance = members.var(1, correction=0)
    factors, residuals = [], []
    for number in range(answer.shape[1]):
        error, between = squared[:, number], variance[:, number]
        usual = float(between.mean())
        ratio = 0.0
        if spread and usual > 0:
            found = minimum(_likelihood(error, between / usual), -math.log(1e3), math.log(1e3))
            if _likelihood(error, between / usual)(found) < _likelihood(error, 0 * between)(0.0):
                ratio = math.exp(found) / usual
        residual = max(float((error / (1 + ratio * between)).mean()), 1e-12)
        factors.append(ratio * residual)
        residuals.append(residual)
    return Variance(tuple(factors), tuple(residuals))


def _likelihood(error: Tensor, between: Tensor) -> Callable[[float], float]:
    """Return the negative log-likelihood of log r, without what does not depend on it."""

    def loss(log_ratio: float) -> float:
        wide = 1 + math.exp(log_ratio) * between
        return float(((error / wide).mean().clamp_min(1e-24)).log() + wide.log().mean())

    return loss


def gaussian_nll(values: Tensor, sigma: Tensor, targets: Tensor) -> Tensor:
    """Return the NLL of a normal distribution in nats, mean over the numbers, `[batch]`."""
    error = (targets.reshape(values.shape) - values).double() / sigma.double()
    return (sigma.double().log() + error.square() / 2 + math.log(2 * math.pi) / 2).mean(-1)
