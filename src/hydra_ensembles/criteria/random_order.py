"""Random scores: the baseline that every criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hosts import HostModel
from .base import WeightScore, criteria


@criteria.register("random")
@dataclass(frozen=True)
class RandomOrder(WeightScore):
    """Seeded uniform numbers in [0, 1); neither weights nor data are read.

    Args:
        seed: Of the draw; equal seeds give equal scores on any device.
    """

    seed: int = 0

    def score(self, host: HostModel) -> list[Tensor]:
        """Draw `[heads]` for every layer."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(heads, generator=generator) for heads in host.head_counts]
