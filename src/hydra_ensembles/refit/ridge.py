"""Ridge regression of many targets by streaming normal equations, in float64.

Rows come in batches; only their moments are kept, so memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..hosts.head_weights import linear_weight

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Ridges that are tried, relative to the mean variance of the features."""


@dataclass
class Moments:
    """Weighted moments of rows of features u [row, n] and targets y [row, k].

    Attributes:
        rows: Number of rows with a positive weight.
        weight: Sum of the weights.
        u, y: Means [n], [k].
        uu, uy, yy: Sums of centred products [n, n], [n, k], and of the targets' squares [k].
    """

    rows: int
    weight: float
    u: Tensor
    y: Tensor
    uu: Tensor
    uy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, features: Tensor, targets: Tensor, weights: Tensor | None = None) -> Moments:
        """Return the moments of one batch of rows; rows of weight 0 are ignored.

        Raises:
            DataError: When a feature, target or weight is NaN or infinite, or a weight is negative.
        """
        features, targets = features.double(), targets.double()
        if weights is None:
            weights = features.new_ones(len(features))
        weights = weights.double()
        if not bool((weights >= 0).all() and weights.isfinite().all()):
            raise DataError("Weights of rows must be finite and not negative.")
        used = weights > 0
        features, targets, weights = features[used], targets[used], weights[used, None]
        if not bool(features.isfinite().all() and targets.isfinite().all()):
            raise DataError(
                "The features or targets of a least-squares fit hold NaN or infinity. Fix or "
                "remove these examples, and check the models' weights."
            )
        total = float(weights.sum())
        share = weights / total if total else weights
        u, y = (share * features).sum(0), (share * targets).sum(0)
        du, dy = features - u, targets - y
        weighted = (weights * du).T
        return cls(
            len(features), total, u, y, weighted @ du, weighted @ dy, (weights * dy**2).sum(0)
        )

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows (Chan et al., 1979)."""
        weight = self.weight + other.weight
        if not weight:
            return self
        share, factor = other.weight / weight, self.weight * other.weight / weight
        du, dy = other.u - self.u, other.y - self.y
        return Moments(
            self.rows + other.rows,
            weight,
            self.u + share * du,
            self.y + share * dy,
            (self.uu + other.uu).addr_(du, du, alpha=factor),
            (self.uy + other.uy).addr_(du, dy, alpha=factor),
            self.yy + other.yy + factor * dy**2,
        )


@dataclass(frozen=True)
class Linear:
    """A linear map y = u @ weight + bias, in float64: [n, k] and [k] (None: without a bias)."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Module, scale: Tensor | float = 1.0) -> Linear:
        """Return the map of a linear layer whose output is multiplied by a scale."""
        bias: Any = layer.bias
        weight = linear_weight(layer).detach().double().cpu().T * scale
        return cls(weight, None if bias is None else bias.detach().double().cpu() * scale)

    @torch.no_grad()
    def put_(self, layer: nn.Module, scale: Tensor | float = 1.0) -> None:
        """Set a layer's weights to this map, which includes the scale of its output, in place."""
        linear_weight(layer).copy_((self.weight / scale).T)
        if self.bias is not None:
            layer.bias.copy_(self.bias / scale)  # type: ignore[operator]

    @classmethod
    def joined(cls, maps: Sequence[Linear]) -> Linear:
        """Return one map with the targets of several, side by side."""
        biases = [one.bias for one in maps if one.bias is not None]
        weight = torch.cat([one.weight for one in maps], 1)
        return cls(weight, torch.cat(biases) if biases else None)

    def columns(self, part: slice) -> Linear:
        """Return the map to some of the targets."""
        return Linear(self.weight[:, part], None if self.bias is None else self.bias[part])

    def errors(self, rows: Moments) -> Tensor:
        """Return the mean over rows of the squared difference from each target [k]."""
        w = self.weight
        offset = rows.y - rows.u @ w - (0.0 if self.bias is None else self.bias)
        spread = rows.yy - 2 * (w * rows.uy).sum(0) + (w * (rows.uu @ w)).sum(0)
        return (spread / rows.weight + offset**2).clamp_min(0)


def solve(
    rows: Moments, ridge: float, *, towards: Tensor | None = None, bias: bool = True
) -> Linear:
    """Fit a linear map by ridge regression.

    min over W, b of  sum_t a_t |y_t - u_t W - b|^2 + ridge * c * |W - W_0|^2 * sum_t a_t,

    with weights a, c the mean diagonal of the covariance of u, and W_0 = `towards` (0 by default).
    The bias is free of the ridge. Without a bias, second moments replace covariances.

    Args:
        rows: Moments of the rows.
        ridge: Relative to the mean diagonal.
        towards: Weights [n, k] to shrink to.
        bias: Whether the map has a bias.
    """
    uu, uy = rows.uu / rows.weight, rows.uy / rows.weight
    if not bias:
        uu, uy = uu + torch.outer(rows.u, rows.u), uy + torch.outer(rows.u, rows.y)
    start = torch.zeros_like(uy) if towards is None else towards.double()
    scale = float(uu.diagonal().mean())
    weight = start
    if scale > 0:  # constant features carry no information: the weights stay
        system = uu + ridge * scale * torch.eye(len(uu), dtype=uu.dtype)
        factor = torch.linalg.cholesky(system)
        weight = start + torch.cholesky_solve(uy - uu @ start, factor)
    return Linear(weight, rows.y - rows.u @ weight if bias else None)


@dataclass(frozen=True)
class Fit:
    """What `fit` chose.

    Attributes:
        linear: The fitted map, or the given one if fitting was not better.
        ridge: The chosen ridge; None if the given map was kept.
        error, given_error: On held-out rows, relative to the variance of the targets.
        few: Whether rows were fewer than unknowns, so that the fit shrank to the given weights.
    """

    linear: Linear
    ridge: float | None
    error: float
    given_error: float
    few: bool


def fit(
    rows: Moments, held_out: Moments, given: Sequence[Linear], *, ridges: Sequence[float] = GRID
) -> list[Fit]:
    """Fit linear maps, each with the ridge that is best on held-out rows, never worse than given.

    With fewer rows than unknowns the fits shrink to the given weights, otherwise to 0. The chosen
    ridge is fitted again to all rows. Where no ridge is better on held-out rows than the given map,
    that is kept.

    Args:
        rows, held_out: Moments; the targets of all maps side by side.
        given: Per map, what is there without fitting.
        ridges: What to try.
    """
    together = Linear.joined(given)
    bias = together.bias is not None
    few = rows.rows < len(rows.u) + bias
    towards = together.weight if few else None
    ends = torch.tensor([len(one.weight[0]) for one in given]).cumsum(0).tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def judged(linear: Linear) -> list[float]:
        errors, spread = linear.errors(held_out), held_out.yy / held_out.weight
        return [float(errors[part].sum() / (spread[part].sum() or 1.0)) for part in parts]

    before = judged(together)
    after = {ridge: judged(solve(rows, ridge, towards=towards, bias=bias)) for ridge in ridges}
    best = [min(ridges, key=lambda ridge: after[ridge][place]) for place in range(len(given))]
    again = {
        ridge: solve(rows + held_out, ridge, towards=towards, bias=bias) for ridge in set(best)
    }
    return [
        Fit(again[ridge].columns(part), ridge, after[ridge][place], before[place], few)
        if after[ridge][place] < before[place]
        else Fit(given[place], None, before[place], before[place], few)
        for place, (ridge, part) in enumerate(zip(best, parts, strict=True))
    ]
