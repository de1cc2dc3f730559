"""Budgets: in which layers members may part, and how many heads they keep, at a counted cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..counting import CostModel
from ..errors import MaskError
from ..masks import HeadMask, HeadScores, keep_count
from ..models import HostModel

FRACTIONS = (1.0, 5 / 6, 2 / 3, 0.5, 1 / 3, 0.25)


@dataclass(frozen=True)
class Budget:
    """A bound on counted multiply-adds relative to the plain host.

    Attributes:
        costs: Counts plans of one host on one shape of batch.
        max_cost: The bound; None for no bound.
    """

    costs: CostModel
    max_cost: float | None

    @classmethod
    def of(cls, host: HostModel, batch: Any, max_cost: float | None) -> Budget:
        """Look at a host and the shape of a batch."""
        return cls(CostModel(host, batch), max_cost)

    def ratio(self, masks: Sequence[HeadMask]) -> float:
        """Return the counted cost of members."""
        return self.costs.ratio(list(masks))

    def allows(self, masks: Sequence[HeadMask]) -> bool:
        """Tell whether members are within the bound."""
        return self.max_cost is None or self.ratio(masks) <= self.max_cost + 1e-9

    def branch_layers(self, members: int) -> list[int]:
        """Return the layers, up to the last, in which members may differ.

        The lowest layer from which two streams of a third of the heads fit: more members part
        higher up. Without a bound, the upper half of the layers.
        """
        depth = len(self.costs.host)
        if self.max_cost is None:
            return list(range(depth // 2, depth))
        lowest = depth
        streams = min(members, 2)
        for first in range(depth - 1, -1, -1):
            if not self.allows(self._distinct(streams, range(first, depth), 1 / 3)):
                break
            lowest = first
        if lowest == depth:
            least = self.ratio(self._distinct(members, [depth - 1], 1 / 3))
            raise MaskError(
                f"max_cost={self.max_cost} leaves no room for {members} members: with only the "
                f"last block branched they cost {least:.3f}. "
                "Raise max_cost or ask for fewer members."
            )
        return list(range(lowest, depth))

    def full_branch_layers(self, members: int, keep: float = 1 / 3) -> list[int]:
        """Return the layers in which all members may differ at once, with a fraction of heads."""
        depth = len(self.costs.host)
        layers: list[int] = []
        for first in range(depth - 1, -1, -1):
            if not self.allows(self._distinct(members, range(first, depth), keep)):
                break
            layers = list(range(first, depth))
        return layers or [depth - 1]

    def keep(self, members: int, layers: Sequence[int]) -> float:
        """Return the largest fraction of heads with which all members fit."""
        for fraction in FRACTIONS:
            if self.allows(self._distinct(members, layers, fraction)):
                return fraction
        return FRACTIONS[-1]

    def _distinct(self, members: int, layers: Sequence[int], keep: float) -> list[HeadMask]:
        """Make masks that differ from the first of the layers on: the dearest case."""
        host = self.costs.host
        rows = {}
        for layer in layers:
            heads = host.head_counts[layer]
            rows[layer] = (heads, keep_count(float(keep), heads))
        masks = []
        for member in range(members):
            full = list(HeadMask.full(host))
            for layer, (heads, count) in rows.items():
                row = torch.zeros(heads, dtype=torch.bool)
                row[[(member * count + i) % heads for i in range(count)]] = True
                full[layer] = row
            masks.append(HeadMask(full))
        return masks


def cheapest_keep(budget: Budget, scores: HeadScores, layers: Sequence[int]) -> HeadMask:
    """Keep as many of the best heads of some layers as one pruned model may cost."""
    full = HeadMask.full(budget.costs.host)
    for fraction in FRACTIONS:
        mask = full
        for layer in layers:
            mask = mask.with_layer(layer, scores.top_k(fraction)[layer])
        if budget.allows([mask]):
            return mask
    return mask
