"""Ways to train members that were tried and that the library does not offer.

A row with `trial: {...}` is distilled with a changed loss or start:

    repel    weight of a push on label-destroying inputs: members whose mutual information is below
             that of their teachers are driven apart
    beyond   how many times the teachers' mutual information is asked for (1 unless said)
    fresh    whether members draw the weights of their branches anew, each its own, so that their
             errors of fitting differ and not only their teachers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.training import distillation
from hydra_ensembles.training.distillation import DistillRun
from hydra_ensembles.training.sample_order import generator
from hydra_ensembles.uncertainty import log_mean_probability


@dataclass(frozen=True)
class Trial:
    """What a trial changes; by default nothing."""

    repel: float = 0.0
    beyond: float = 1.0
    fresh: bool = False


def mutual_information(log_probabilities: Tensor) -> Tensor:
    """Return H(mean p) - mean H(p) over members, `[batch]`; gradients pass."""
    each = -(log_probabilities.exp() * log_probabilities).sum(-1).mean(1)
    mean = log_mean_probability(log_probabilities)
    return -(mean.exp() * mean).sum(-1) - each


class TrialRun(DistillRun):
    """A distillation with the changes of a trial."""

    trial: ClassVar[Trial] = Trial()

    @torch.no_grad()
    def _prepare(self) -> None:
        super()._prepare()
        if not self.trial.fresh:
            return
        for name, parameter in self.trained.items():
            if name not in self.slow and parameter.ndim > 1:  # at the scale that training gave it
                noise = torch.randn(parameter.shape, generator=generator("fresh", self.seed, name))
                parameter.copy_(noise * parameter.std())

    def _losses(self, name: str, target: Tensor, logits: Tensor, batch: Any) -> Tensor:
        losses = super()._losses(name, target, logits, batch)
        if name != "outliers" or logits.shape[1] == 1:
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
    with patch.object(distillation, "DistillRun", changed):
        yield
