"""Means and covariances of features, one pass, in float64: all that novelty keeps of known data.

Features are unit vectors `[example, tap, width]` (Mahalanobis++, arXiv 2505.18032). A tap is one
place in the model that is listened to. Sums are additive, so chunks, shuffles and batch sizes give
the same statistics up to rounding.

Wide hosts have more dimensions than known examples. While there are at most half as many examples
as dimensions, the examples themselves are kept, and a thin SVD of them gives the distances: exact,
with n d numbers per tap instead of d^2, and n^2 d steps instead of d^3. Above that, sums of outer
products are kept, and a Cholesky factor gives the distances, exact as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import DataError
from .distances import ClassDistance, GlobalDistance, Whitening, unit


@dataclass(frozen=True)
class Scatter:
    """The sum S = X^T X over examples, of the centred features X of one tap.

    Attributes:
        factor: X, `[example, width]`, when `thin`; else S, `[width, width]`.
        thin: See `factor`.
    """

    factor: Tensor
    thin: bool

    def trace(self) -> Tensor:
        """Return the sum of the variances, times n."""
        return self.factor.square().sum() if self.thin else self.factor.trace()

    def square(self) -> Tensor:
        """Return the sum of the squares of all entries of S."""
        return (self.factor @ self.factor.T if self.thin else self.factor).square().sum()

    def along(self, direction: Tensor) -> Tensor:
        """Return v^T S v."""
        product = self.factor @ direction
        return product.square().sum() if self.thin else direction @ product


@dataclass
class Moments:
    """Sums of unit features over examples, in float64; while they are few, the features.

    Attributes:
        total: Sum of features, `[tap, width]`.
        class_counts: Examples per class, `[class]`; empty without labels.
        class_totals: Sum of features per class, `[class, class tap, width]`.
        count: Number of examples n.
        outer: Sum of outer products, `[tap, width, width]`; None while features are kept.
        rows, labels: The features and classes, while they are kept.
    """

    total: Tensor
    class_counts: Tensor
    class_totals: Tensor
    count: int = 0
    outer: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, taps: int, width: int, classes: int = 0, *, first_class_tap: int = 0) -> Moments:
        """Start with no examples; class totals are kept of the taps from `first_class_tap` on."""
        double = torch.float64
        return cls(
            torch.zeros(taps, width, dtype=double),
            torch.zeros(classes, dtype=torch.long),
            torch.zeros(classes, taps - first_class_tap, width, dtype=double),
        )

    def add_(self, features: Tensor, labels: Tensor | None = None) -> None:
        """Add examples `[example, tap, width]`, in place."""
        if features.shape[1:] != self.total.shape:
            raise DataError(
                f"Features of shape {list(features.shape)}; expected [example, "
                f"{self.total.shape[0]} taps, {self.total.shape[1]} wide]."
            )
        rows = unit(features.double())
        self.count += len(rows)
        self.total += rows.sum(0)
        if labels is not None and len(self.class_counts):
            self.class_counts += torch.bincount(labels, minlength=len(self.class_counts))
            self.class_totals.index_add_(0, labels, rows[:, -self.class_totals.shape[1] :])
            self.labels.append(labels)
        self.rows.append(features)
        taps, width = self.total.shape
        if self.outer is None and self.count <= width // 2:
            return
        if self.outer is None:
            self.outer = torch.zeros(taps, width, width, dtype=torch.float64)
        for features in self.rows:
            by_tap = unit(features.double()).transpose(0, 1)
            self.outer.baddbmm_(by_tap.transpose(1, 2), by_tap)
        self.rows, self.labels = [], []

    def mean(self) -> Tensor:
        """Return the mean feature, `[tap, width]`."""
        return self.total / self.count

    def scatter(self, tap: int) -> Scatter:
        """Return the sum of (f - mu)(f - mu)^T over examples at one tap."""
        mean = self.total[tap] / self.count
        if self.outer is None:
            return Scatter(self._features(tap) - mean, thin=True)
        return Scatter(self.outer[tap] - self.count * mean[:, None] * mean, thin=False)

    def class_means(self, tap: int) -> Tensor:
        """Return the mean feature per class at one class tap, `[class, width]`; zero if empty."""
        first = len(self.total) - self.class_totals.shape[1]
        return self.class_totals[:, tap - first] / self.class_counts.clamp_min(1)[:, None]

    def within_scatter(self, tap: int) -> Scatter:
        """Return the scatter around the class means at one class tap."""
        means = self.class_means(tap)
        if self.outer is None:
            return Scatter(self._features(tap) - means[torch.cat(self.labels)], thin=True)
        weighted = means * self.class_counts[:, None]
        return Scatter(self.outer[tap] - weighted.T @ means, thin=False)

    def _features(self, tap: int) -> Tensor:
        return unit(torch.cat([rows[:, tap] for rows in self.rows]).double())


def ledoit_wolf(count: int, mean: Tensor, scatter: Scatter) -> Tensor:
    """Return the ridge of Ledoit and Wolf (2004) at one tap, from moments of unit vectors.

    Their estimate (1 - a) S/n + a m I is, up to scale, S/n + ridge I with ridge = m a / (1 - a).
    The fourth moment that a needs follows from the first two, since |f| = 1:
    |f - mu|^2 = 1 - 2 f.mu + |mu|^2.
    """
    width = len(mean)
    level = scatter.trace() / count / width
    spread = scatter.square() / count**2
    distance = (spread - width * level**2).clamp_min(1e-300)
    # mean of |f - mu|^4 = (1 + |mu|^2)^2 - 4 (1 + |mu|^2) |mu|^2 + 4 mean((f.mu)^2)
    norm = mean.square().sum()
    along = scatter.along(mean) / count + norm**2
    fourth = (1 + norm) ** 2 - 4 * (1 + norm) * norm + 4 * along
    noise = (fourth - spread) / count
    share = (noise / distance).clamp(1e-6, 1 - 1e-6)
    return level * share / (1 - share)


def oracle_approximating(count: int, scatter: Scatter) -> Tensor:
    """Return the ridge of oracle-approximating shrinkage at one tap (Chen et al., 2010).

    For scatter around class means, whose fourth moments are not kept: it needs the scatter only.

    Args:
        count: Degrees of freedom, examples less classes.
        scatter: Around class means.
    """
    width = scatter.factor.shape[-1]
    trace = scatter.trace() / count
    square = scatter.square() / count**2
    below = (count + 1) * (square - trace**2 / width).clamp_min(1e-300)
    share = ((square + trace**2) / below).clamp(1e-6, 1 - 1e-6)  # without the terms in 2 / width
    return trace / width * share / (1 - share)


def whiten(count: int, scatter: Scatter, ridge: Tensor) -> Whitening:
    """Return W with W W^T = (S / n + ridge I)^-1 at one tap, in float64."""
    ridge = ridge.clamp_min(1e-20)  # features that are all equal
    if scatter.thin:
        # the thin SVD of X by X X^T; directions that X does not span never come up
        values, vectors = torch.linalg.eigh(scatter.factor @ scatter.factor.T)
        larger = 1 + values.clamp_min(0) / (count * ridge)
        shorter = ((larger + larger.sqrt()) * count * ridge).rsqrt()
        return Whitening(scatter.factor.T @ (vectors * shorter), ridge.rsqrt())
    covariance = scatter.factor / count
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    lower, failed = torch.linalg.cholesky_ex(covariance + ridge * identity)
    if int(failed):  # rounding made an eigenvalue negative
        values, vectors = torch.linalg.eigh(covariance)
        return Whitening(vectors / (values.clamp_min(0) + ridge).sqrt())
    return Whitening(torch.linalg.solve_triangular(lower, identity, upper=False).T)


def stacked(taps: list[Whitening]) -> Whitening:
    """Join the whitenings of single taps, all thin or none."""
    levels = [tap.level for tap in taps if tap.level is not None]
    matrix = torch.stack([tap.matrix for tap in taps])
    return Whitening(matrix, torch.stack(levels) if levels else None)


def global_distance(moments: Moments) -> GlobalDistance:
    """Fit the distance to all known data, with Ledoit and Wolf's ridge."""
    mean, count = moments.mean(), moments.count
    taps, ridges = [], []
    for tap in range(len(mean)):
        scatter = moments.scatter(tap)
        ridges.append(ledoit_wolf(count, mean[tap], scatter))
        taps.append(whiten(count, scatter, ridges[-1]))
    return GlobalDistance(mean, stacked(taps), count, torch.stack(ridges))


def class_distance(moments: Moments) -> ClassDistance:
    """Fit the distance to classes on the class taps, with oracle-approximating shrinkage."""
    count, present = moments.count, moments.class_counts > 0
    free = max(1, count - int(present.sum()))
    first = len(moments.total) - moments.class_totals.shape[1]
    centre = moments.mean()[first:]
    taps, means, ridges = [], [], []
    for tap in range(first, len(moments.total)):
        scatter = moments.within_scatter(tap)
        ridges.append(oracle_approximating(free, scatter))
        taps.append(whiten(count, scatter, ridges[-1]))
        apart = moments.class_means(tap)[present] - centre[tap - first]
        means.append(stacked(taps[-1:])(apart[None])[0])
    counts = moments.class_counts[present]
    return ClassDistance(centre, torch.stack(means), stacked(taps), counts, torch.stack(ridges))
