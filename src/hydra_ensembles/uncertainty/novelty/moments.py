"""Means and covariances of features, one pass, in float64: all that novelty keeps of known data.

Features are unit vectors `[example, tap, width]` (Mahalanobis++, arXiv 2505.18032). A tap is one
place in the model that is listened to. Sums are additive, so chunks, shuffles and batch sizes give
the same statistics up to rounding, and parts of the data can be joined.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError


def full_precision(features: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off, if it is on: bfloat16 would round features by more than they differ."""
    kind = features.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()  # an exported graph would keep a change that changes nothing
    return torch.autocast(kind, enabled=False)


def unit(features: Tensor) -> Tensor:
    """Return features `[..., width]` at length 1 (a zero vector stays)."""
    lengths: Tensor = features.norm(dim=-1, keepdim=True)
    return features / lengths.clamp_min(1e-12)


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
