"""What a criterion is: a formula that turns what is known of a head into one number.

**Higher = keep**, except for criteria that say `lower_is_kept = True` (attention entropy is
reported as it is defined); `ranked` turns any criterion's scores into *higher = keep*.

There are four kinds, by what they look at. Everything else (one pass over the data, gates,
attention, averaging in float64) is shared:

- `WeightScore`: the weights only.
- `GateGradient`: gradients of each sample's loss in the gates of the heads.
- `AttentionScore`: queries and keys of each layer, as its softmax sees them.
- `CombinedScore`: the tables of other criteria.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..heads.masks import HeadScores
from ..hosts import HostModel
from ..registry import Registry

if TYPE_CHECKING:
    from .attention import AttentionView


@dataclass(frozen=True)
class Criterion(ABC):  # noqa: B024  (abstract through its four kinds)
    """Base of all criteria: a frozen dataclass whose fields are its options."""

    lower_is_kept: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Registered name with the options that differ from their defaults: `hies(alpha=0.3)`."""
        name = next((n for n in criteria if criteria[n] is type(self)), type(self).__name__)
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.repr and getattr(self, f.name) != f.default
        ]
        return f"{name}({', '.join(changed)})" if changed else name

    def finish(self, mean: HeadScores) -> HeadScores:
        """Turn the mean over the calibration set into the score (the mean itself by default)."""
        return mean


class WeightScore(Criterion):
    """A score of the weights only; no data is read."""

    @abstractmethod
    def score(self, host: HostModel) -> list[Tensor]:
        """Return one tensor `[heads]` per layer."""


class GateGradient(Criterion):
    """A mean over samples of a function of dL(x)/dg_h at g = 1."""

    @abstractmethod
    def accumulate(self, gradients: Tensor) -> Tensor:
        """Sum over a batch: per-sample gradients `[batch, heads]` to `[heads]`."""


class AttentionScore(Criterion):
    """A mean over samples of a function of a layer's attention."""

    @abstractmethod
    def values(self, view: AttentionView) -> Tensor:
        """Return one value for each sample and head `[batch, heads]`; NaN leaves a sample out."""


@dataclass(frozen=True)
class Setting:
    """What a `CombinedScore` may need besides the tables of its parts."""

    host: HostModel
    held_out: Iterable[Any] | None = None
    progress: bool = False


class CombinedScore(Criterion):
    """A score computed from the tables of other criteria, which share one pass over the data."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Criterion, ...]:
        """The criteria whose tables are needed."""

    @abstractmethod
    def combine(self, tables: Sequence[HeadScores], setting: Setting) -> HeadScores:
        """Compute the score from the tables of `parts`, in their order."""


criteria: Registry[Callable[..., Criterion]] = Registry("criterion")
"""Criteria by name; `@criteria.register("mine")` adds a user's own."""


def as_criterion(criterion: str | Criterion) -> Criterion:
    """Return a criterion by its registered name, or the one that was given."""
    return criteria[criterion]() if isinstance(criterion, str) else criterion


def ranked(criterion: str | Criterion, scores: HeadScores) -> HeadScores:
    """Return scores in which higher = keep, whatever the criterion's own direction is."""
    return -scores if as_criterion(criterion).lower_is_kept else scores
