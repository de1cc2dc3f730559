"""Ways to train members that were tried and that the library does not offer.

A row with `trial: {...}` is distilled with a changed loss, or with other weights at its end:

    joint            share of the loss that is the mean's: the mean of the members' probabilities
                     learns the mean of the teachers, beside each member its own
    labels_on_mean   labels reach that mean only; each member learns its teacher purely
    repel            weight of a push on label-destroying inputs: members whose mutual information
                     is below that of their teachers are driven apart
    beyond           how many times the teachers' mutual information is asked for (1 unless said)
    average_from     the weights are the mean over the ends of the epochs from this share on
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.training import distilling
from hydra_ensembles.training.distill_run import DistillRun


@dataclass(frozen=True)
class Trial:
    """What a trial changes; by default nothing."""

    joint: float = 0.0
    labels_on_mean: bool = False
    repel: float = 0.0
    beyond: float = 1.0
    average_from: float = 1.0


def log_mean(logits: Tensor) -> Tensor:
    """Return the log of the members' mean probability, `[batch, class]`."""
    return logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])


def mutual_information(log_probabilities: Tensor) -> Tensor:
    """Return H(mean p) - mean H(p) over members, `[batch]`; gradients pass."""
    each = -(log_probabilities.exp() * log_probabilities).sum(-1).mean(1)
    mean = log_mean(log_probabilities)
    return -(mean.exp() * mean).sum(-1) - each


class TrialRun(DistillRun):
    """A distillation with the changes of a trial."""

    trial: ClassVar[Trial] = Trial()

    def _losses(self, part: str, target: Tensor, logits: Tensor, batch: Any) -> Tensor:
        if self.trial.labels_on_mean:
            losses = super()._losses("no labels", target, logits, batch)
        else:
            losses = super()._losses(part, target, logits, batch)
        if self.trial.joint and logits.shape[1] > 1:  # one member is its own mean
            mean = log_mean(logits)[:, None]
            together = super()._losses(part, target.mean(1, keepdim=True), mean, batch)
            losses = (1 - self.trial.joint) * losses + self.trial.joint * together
        if self.trial.repel and part == "outliers" and logits.shape[1] > 1:
            asked = self.trial.beyond * mutual_information(target.clamp_min(1e-8).log())
            lack = F.relu(asked - mutual_information(logits.log_softmax(-1)))
            losses = losses + self.trial.repel * lack[:, None]
        return losses

    def _end_epoch(self, epoch: int) -> None:
        super()._end_epoch(epoch)
        first = round(self.trial.average_from * self.settings.epochs)
        if epoch < first:
            return
        weight = 1 / (epoch - first + 1)
        now = {name: value.detach().clone() for name, value in self._state().items()}
        self.best = {
            name: torch.lerp(self.best[name], value, weight)
            if name in self.best and value.is_floating_point()
            else value
            for name, value in now.items()
        }


@contextmanager
def trying(options: Mapping[str, Any]) -> Iterator[None]:
    """Let `distill` train as a trial says, within the block."""
    if not options:
        yield
        return
    changed = type("ChosenTrial", (TrialRun,), {"trial": Trial(**options)})
    with patch.object(distilling, "DistillRun", changed):
        yield
