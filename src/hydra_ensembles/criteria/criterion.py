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

import torch.nn.functional as F
from torch import Tensor

from ..data.padding import IGNORED
from ..errors import DataError, HydraError
from ..heads.head_mask import HeadScores
from ..hosts import HostModel
from ..hosts.model_output import predicts_next_token
from ..registry import Registry

if TYPE_CHECKING:
    from .attention_watch import AttentionView

Loss = Callable[[Tensor, Any], Tensor]
"""Logits (the model's main output) and labels to one loss for each sample, `[batch]`."""


def sample_losses(
    logits: Tensor, labels: Tensor | None, host: HostModel, *, loss: Loss | None, padding: Any
) -> Tensor:
    """Return one loss for each sample, `[batch]`.

    Args:
        logits: `[batch, class]`, or `[batch, token, class]` of a language model or tagger.
        labels: `[batch]` or `[batch, token]` (-100 is left out); None only with a user's own loss.
        host: Tells whether tokens predict the next one.
        loss: A user's own; cross-entropy by default.
        padding: The batch's `attention_mask` `[batch, token]`, or None.
    """
    if loss is not None:
        losses = loss(logits, labels)
    elif labels is None:
        raise DataError(
            "The calibration data has no labels, but the loss is cross-entropy. Give batches as "
            "(inputs, labels) or mappings with 'labels', or pass loss=<callable(logits, labels)>."
        )
    else:
        labels = labels.to(logits.device)
        if logits.dim() == 3 and labels.shape == logits.shape[:2]:
            losses = _token_losses(logits, labels, host, padding)
        elif logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
            losses = F.cross_entropy(logits.float(), labels.long(), reduction="none")
        else:
            raise DataError(
                f"Cross-entropy needs logits [batch, class] and whole labels [batch] (or both with "
                f"a token axis), but found {list(logits.shape)} and {labels.dtype} "
                f"{list(labels.shape)}. Pass loss=<callable(logits, labels)> for another task."
            )
    if not isinstance(losses, Tensor) or losses.shape != logits.shape[:1]:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise DataError(
            f"The loss returned {found} for {len(logits)} samples; expected one number for each, "
            'since absolute values are taken per sample. Use reduction="none".'
        )
    return losses


def _token_losses(logits: Tensor, labels: Tensor, host: HostModel, padding: Any) -> Tensor:
    """Average cross-entropy over the labelled, unpadded tokens of each sample."""
    if isinstance(padding, Tensor) and padding.shape == labels.shape:
        labels = labels.masked_fill(~padding.to(labels.device).bool(), IGNORED)
    if predicts_next_token(host.model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels.long(), reduction="none", ignore_index=IGNORED
    )
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)


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
