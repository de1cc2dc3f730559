"""Criteria: formulas that give each head one number.

**Higher = keep**, except for criteria that say `lower_is_kept = True` (attention entropy is
reported as it is defined); `ranked` turns any criterion's scores into *higher = keep*.

There are five kinds, by what they read. Everything else (one pass over the data, gates, attention,
averaging in float64) is shared:

- `WeightScore`: the weights only.
- `GateGradient`: gradients of each sample's loss in the gates of the heads.
- `OutputScore`: what each head writes to the states.
- `AttentionScore`: queries and keys of each layer, as its softmax sees them.
- `CombinedScore`: the tables of other criteria.

The first three also score the neurons of MLPs (`score_units`): a neuron is a unit of width 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..errors import DataError, HydraError
from ..heads.head_mask import HeadScores
from ..hosts import HostModel
from ..registry import Registry
from ..tasks import Tokens

if TYPE_CHECKING:
    from .attention_watch import AttentionView

Loss = Callable[[Tensor, Any], Tensor]
"""Logits (the model's main output) and labels to one loss for each sample, `[batch]`."""


def sample_losses(
    logits: Tensor, labels: Tensor | None, host: HostModel, *, loss: Loss | None, padding: Any
) -> Tensor:
    """Return one loss for each sample, `[batch]`.

    Args:
        logits: What the host's task reads, `[batch, ...]`.
        labels: As the task takes them (-100 is left out); None only with a user's own loss.
        host: Tells the task, whose loss it is.
        loss: A user's own; the task's by default.
        padding: The batch's `attention_mask` `[batch, token]`, or None.
    """
    task = host.task
    if loss is not None:
        losses = loss(logits, labels)
    elif labels is None:
        raise DataError(
            f"The calibration data has no labels, which the loss of {task.title} needs. Give "
            "batches as (inputs, labels) or mappings with 'labels', or pass "
            "loss=<callable(logits, labels)>."
        )
    else:
        if logits.dim() == 3 and labels.shape == logits.shape[:2] and not task.by_token:
            task = Tokens()  # a tagger that its class does not name
        labels = task.check_labels(labels, "the calibration data", size=logits.shape[-1])
        losses = task.losses(logits, labels, padding)
    if not isinstance(losses, Tensor) or losses.shape != logits.shape[:1]:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise DataError(
            f"The loss returned {found} for {len(logits)} samples; expected one number for each, "
            'since absolute values are taken per sample. Use reduction="none".'
        )
    return losses


@dataclass(frozen=True)
class Criterion(ABC):  # noqa: B024  (abstract through its five kinds)
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

    def score_neurons(self, host: HostModel) -> list[Tensor]:
        """Return one tensor `[neurons]` per layer, empty where neurons stay."""
        raise HydraError(f"{self.label} does not score neurons: give it a score_neurons().")


class GateGradient(Criterion):
    """A mean over samples of a function of dL(x)/dg at g = 1, g the gate of a head or neuron."""

    @abstractmethod
    def accumulate(self, gradients: Tensor) -> Tensor:
        """Sum over a batch: per-sample gradients `[batch, units]` to `[units]`."""


class OutputScore(Criterion):
    """A mean over tokens of a function of what heads or neurons write to the states."""

    @abstractmethod
    def total(self, values: Tensor, weight: Tensor) -> Tensor:
        """Sum over tokens, `[units]`.

        Args:
            values: What the linear reads, float64 `[tokens, units, width]`; 1 wide for neurons.
            weight: Its columns by unit, float64 `[units, states, width]`.
        """


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
