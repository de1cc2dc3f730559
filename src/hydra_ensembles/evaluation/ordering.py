"""Ranked examples under many weightings at once, so that resampling needs no sort and no loop.

A draw with replacement is a row of counts: how often each example is in it. All figures are
functions of such rows `[draw, example]`; the figures of the data itself are those of ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Weighed(NamedTuple):
    """Counts of ordered examples `[draw, n]` and the sums of the first 0 ... n, `[draw, n + 1]`."""

    counts: Tensor
    before: Tensor


class Order:
    """Values in ascending order.

    Attributes:
        values: The values, sorted.
        rows: Where each of them stands in the data.
        ends: The last place of every tie, `[distinct value]`.
    """

    def __init__(self, values: Tensor, rows: Tensor | None = None) -> None:
        self.values, places = values.sort(stable=True)
        self.rows = places if rows is None else rows[places]
        last = torch.ones(len(values), dtype=torch.bool)
        last[:-1] = self.values[1:] != self.values[:-1]
        self.ends = last.nonzero().flatten()

    def weigh(self, counts: Tensor) -> Weighed:
        """Bring counts `[draw, example]` of the data into this order."""
        ordered = counts.index_select(1, self.rows)
        return Weighed(ordered, sums_before(ordered))

    def by_tie(self, before: Tensor) -> Tensor:
        """Keep the sums at the ends of ties: `[draw, n + 1]` to `[draw, distinct value + 1]`."""
        if len(self.ends) == len(self.rows):
            return before
        return torch.cat([before[:, :1], before.index_select(1, self.ends + 1)], 1)

    def below(self, values: Tensor) -> Tensor:
        """Return how many of these values are less than each of some others."""
        return torch.searchsorted(self.values, values)

    def up_to(self, values: Tensor) -> Tensor:
        """Return how many of these values are not greater than each of some others."""
        return torch.searchsorted(self.values, values, right=True)


def sums_before(columns: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ... n columns, `[draw, n + 1]`."""
    sums = columns.new_zeros(len(columns), columns.shape[1] + 1)
    torch.cumsum(columns, 1, out=sums[:, 1:])
    return sums


def once(examples: int) -> Tensor:
    """Return the counts of the data itself: every example once, `[1, example]`."""
    return torch.ones(1, examples, dtype=torch.float64)
