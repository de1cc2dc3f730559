"""Mahalanobis distances of unit features: to all known data, and relative to the nearest class.

    global    d(f)   = (f - mu)^T Sigma^-1 (f - mu)                    arXiv 2505.18032, no labels
    relative  r(f)   = min_c (f - mu_c)^T Sigma_w^-1 (f - mu_c) - d(f)      arXiv 2106.09022

Sigma = S / n + ridge I with the scatter S of the known data, Sigma_w the same around class means.
Larger is further away, **so a higher distance speaks for a new input**, as everywhere.

A known example's own distance is too small: it helped to place mu and Sigma. Leaving it out has a
closed form (Sherman and Morrison): with d the distance under all n examples, its distance under
the others is n d / (n - 1 - d). So every known example is held out once, in one pass.

Means and covariances of features, one pass, in float64: all that novelty keeps of known data.

Features are unit vectors `[example, tap, width]` (Mahalanobis++, arXiv 2505.18032). A tap is one
place in the model that is listened to. Sums are additive, so chunks, shuffles and batch sizes give
the same statistics up to rounding, and parts of the data can be joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError
from .novelty import ClassDistance, GlobalDistance, unit


@dataclass
class Moments:
    """Sums of unit features over examples, in float64.

    Attributes:
        count: Number of examples n.
        total: Sum of features, `[tap, width]`.
        outer: Sum of outer products, `[tap, width, width]`.
        class_counts: Examples per class, `[class]`; empty without labels.
        class_totals: Sum of features per class, `[class, tap, width]`.
    """

    count: int
    total: Tensor
    outer: Tensor
    class_counts: Tensor
    class_totals: Tensor

    @classmethod
    def empty(cls, taps: int, width: int, classes: int = 0) -> Moments:
        """Start with no examples."""
        double = torch.float64
        return cls(
            0,
            torch.zeros(taps, width, dtype=double),
            torch.zeros(taps, width, width, dtype=double),
            torch.zeros(classes, dtype=torch.long),
            torch.zeros(classes, taps, width, dtype=double),
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
        by_tap = rows.transpose(0, 1)
        self.outer.baddbmm_(by_tap.transpose(1, 2), by_tap)
        if labels is not None and len(self.class_counts):
            self.class_counts += torch.bincount(labels, minlength=len(self.class_counts))
            self.class_totals.index_add_(0, labels, rows)

    def mean(self) -> Tensor:
        """Return the mean feature, `[tap, width]`."""
        return self.total / self.count

    def scatter(self) -> Tensor:
        """Return the sum of (f - mu)(f - mu)^T over examples, `[tap, width, width]`."""
        mean = self.mean()
        return self.outer - self.count * mean[:, :, None] * mean[:, None, :]

    def class_means(self) -> Tensor:
        """Return the mean feature per class, `[tap, class, width]`; zero for empty classes."""
        means = self.class_totals / self.class_counts.clamp_min(1)[:, None, None]
        return means.transpose(0, 1)

    def within_scatter(self) -> Tensor:
        """Return the scatter around the class means, `[tap, width, width]`."""
        apart = self.class_means()  # [tap, class, width]
        weighted = apart * self.class_counts[:, None]
        return self.outer - weighted.transpose(1, 2) @ apart


def ledoit_wolf(count: int, mean: Tensor, scatter: Tensor) -> Tensor:
    """Return the ridge of Ledoit and Wolf (2004) per tap, `[tap]`, from moments of unit vectors.

    Their estimate (1 - a) S/n + a m I is, up to scale, S/n + ridge I with ridge = m a / (1 - a).
    The fourth moment that a needs follows from the first two, since |f| = 1:
    |f - mu|^2 = 1 - 2 f.mu + |mu|^2.
    """
    width = mean.shape[-1]
    covariance = scatter / count
    level = covariance.diagonal(dim1=1, dim2=2).mean(1)
    spread = covariance.square().sum((1, 2))
    distance = (spread - width * level**2).clamp_min(1e-300)
    # mean of |f - mu|^4 = (1 + |mu|^2)^2 - 4 (1 + |mu|^2) |mu|^2 + 4 mean((f.mu)^2)
    norm = mean.square().sum(1)
    along = torch.einsum("ti,tij,tj->t", mean, covariance, mean) + norm**2
    fourth = (1 + norm) ** 2 - 4 * (1 + norm) * norm + 4 * along
    noise = (fourth - spread) / count
    share = (noise / distance).clamp(1e-6, 1 - 1e-6)
    return level * share / (1 - share)


def oracle_approximating(count: int, scatter: Tensor) -> Tensor:
    """Return the ridge of oracle-approximating shrinkage per tap, `[tap]` (Chen et al., 2010).

    For scatter around class means, whose fourth moments are not kept: it needs the scatter only.

    Args:
        count: Degrees of freedom, examples less classes.
        scatter: Sum of outer products, `[tap, width, width]`.
    """
    width = scatter.shape[-1]
    covariance = scatter / count
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    square = covariance.square().sum((1, 2))
    below = (count + 1) * (square - trace**2 / width).clamp_min(1e-300)
    share = ((square + trace**2) / below).clamp(1e-6, 1 - 1e-6)  # without the terms in 2 / width
    return trace / width * share / (1 - share)


def whiten(count: int, scatter: Tensor, ridge: Tensor) -> Tensor:
    """Return W with W W^T = (S / n + ridge I)^-1 per tap, `[tap, width, width]`, in float64."""
    values, vectors = torch.linalg.eigh(scatter / count)
    whitening: Tensor = vectors / (values.clamp_min(0) + ridge[:, None]).sqrt()[:, None, :]
    return whitening


def global_distance(moments: Moments) -> GlobalDistance:
    """Fit the distance to all known data, with Ledoit and Wolf's ridge."""
    mean, scatter = moments.mean(), moments.scatter()
    ridge = ledoit_wolf(moments.count, mean, scatter)
    return GlobalDistance(mean, whiten(moments.count, scatter, ridge), moments.count)


def held_out_distance(fitted: GlobalDistance, features: Tensor) -> Tensor:
    """Return the distance of known examples to all others, `[example, tap]`."""
    distance = fitted(features)
    return fitted.count * distance / (fitted.count - 1 - distance)


def class_distance(moments: Moments, taps: slice) -> ClassDistance:
    """Fit the distance to classes on some taps, with oracle-approximating shrinkage."""
    count = moments.count
    scatter = moments.within_scatter()[taps]
    present = moments.class_counts > 0
    ridge = oracle_approximating(max(1, count - int(present.sum())), scatter)
    whitening = whiten(count, scatter, ridge)
    centre = moments.mean()[taps]
    means = (moments.class_means()[taps][:, present] - centre[:, None]) @ whitening
    return ClassDistance(centre, means, whitening, moments.class_counts[present])


def held_out_class_distance(fitted: ClassDistance, features: Tensor, classes: Tensor) -> Tensor:
    """Return the distance of known examples to the classes of all others, `[example, tap]`.

    Without example i of class y (n_y examples, k = n_y / (n_y - 1), z = f - mu_y) the class
    mean moves to mu_y - z / (n_y - 1) and the scatter loses k z z^T.
    """
    count = int(fitted.counts.sum())
    square, white = fitted.to_classes(features)
    number = fitted.counts[classes].to(white.dtype)
    share = number / (number - 1).clamp_min(1)  # k
    own_mean = fitted.means[:, classes]
    apart = white - own_mean
    lever = apart.square().sum(-1) / count  # z^T A^-1 z, with A = n Sigma_w
    gain = share / (1 - share * lever)
    across = ((apart * white).sum(-1, keepdim=True) - apart @ fitted.means.transpose(1, 2)) / count
    others = (count - 1) * (square / count + gain[..., None] * across.square())
    own = (count - 1) * share * gain * lever
    own = torch.where(number > 1, own, torch.inf)  # its class goes with it
    index = classes.expand(len(own), -1)[..., None]
    return others.scatter(2, index, own[..., None]).amin(-1).T
