"""Ways to train members that were tried and that the library does not offer.

A row with `trial: {...}` is distilled with a changed loss:

    repel    weight of a push on label-destroying inputs: members whose mutual information is below
             that of their teachers are driven apart
    beyond   how many times the teachers' mutual information is asked for (1 unless said)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.training import distilling
from hydra_ensembles.training.distill_run import DistillRun, log_mean


@dataclass(frozen=True)
class Trial:
    """What a trial changes; by default nothing."""

    repel: float = 0.0
    beyond: float = 1.0


def mutual_information(log_probabilities: Tensor) -> Tensor:
    """Return H(mean p) - mean H(p) over members, `[batch]`; gradients pass."""
    each = -(log_probabilities.exp() * log_probabilities).sum(-1).mean(1)
    mean = log_mean(log_probabilities)
    return -(mean.exp() * mean).sum(-1) - each


class TrialRun(DistillRun):
    """A distillation with the changes of a trial."""

    trial: ClassVar[Trial] = Trial()

    def _losses(self, part: str, target: Tensor, logits: Tensor, batch: Any) -> Tensor:
        losses = super()._losses(part, target, logits, batch)
        if part != "outliers" or logits.shape[1] == 1:
            return losses
        asked = self.trial.beyond * mutual_information(target.clamp_min(1e-8).log())
        lack = F.relu(asked - mutual_information(logits.log_softmax(-1)))
        return losses + self.trial.repel * lack[:, None]


@contextmanager
def trying(options: Mapping[str, Any]) -> Iterator[None]:
    """Let `distill` train as a trial says, within the block."""
    if not options:
        yield
        return
    changed = type("ChosenTrial", (TrialRun,), {"trial": Trial(**options)})
    with patch.object(distilling, "DistillRun", changed):
        yield
