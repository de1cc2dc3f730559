"""Which rows of a table are told apart: a paired bootstrap over examples and draws of known data.

Every row is scored on the same examples and draws. Examples of each set are drawn with replacement,
and so are the draws of known data, alike for all rows (Efron, 1979): what varies together cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.evaluation.intervals import percentiles

RESAMPLES = 500
Scored = dict[str, Tensor]
"""Scores of the examples of every set, `test` among them."""


def resampled_figures(
    inside: Tensor, outside: Tensor, inside_weight: Tensor, outside_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return AUROC and FPR95 `[resample]` of examples that count as often as their weights say.

    Args:
        inside: Scores of known examples, in rising order.
        outside: Scores of outliers.
        inside_weight: `[resample, known example]`, in the same order.
        outside_weight: `[resample, outlier]`.
    """
    share = outside_weight / outside_weight.sum(1, keepdim=True)
    below = F.pad(inside_weight.cumsum(1), (1, 0)) / inside_weight.sum(1, keepdim=True)
    under, upto = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    auroc = ((below[:, under] + below[:, upto]) / 2 * share).sum(1)
    falling = outside.argsort(descending=True)
    reached = share[:, falling].cumsum(1) >= 0.95 - 1e-9
    threshold = outside[falling][reached.int().argmax(1)]
    passed = below.gather(1, torch.searchsorted(inside, threshold)[:, None])[:, 0]
    return auroc, 1 - passed


class Resamples:
    """The same resamples of examples and draws for every row.

    Args:
        sizes: Examples per set; those of `test` are all that any draw tests on.
        places: Of every draw, which of them it tests on.
    """

    def __init__(self, sizes: Mapping[str, int], places: Sequence[Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)

        def counts(size: int) -> Tensor:
            picked = torch.randint(size, (RESAMPLES, size), generator=generator)
            return torch.zeros(RESAMPLES, size).scatter_add_(
                1, picked, torch.ones(1).expand_as(picked)
            )

        self.places = places
        self.weights = {name: counts(size).double() for name, size in sizes.items()}
        self.draws = counts(len(places)).double() / len(places)

    def figures(self, draws: Sequence[Scored]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return AUROC and FPR95 per outlier set, `[resample]` each, of one row's draws."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for number, scored in enumerate(draws):
            inside, order = scored["test"].sort()
            weight = self.weights["test"][:, self.places[number][order]]
            for name in scored.keys() - {"test"}:
                pair = resampled_figures(inside, scored[name], weight, self.weights[name])
                before = found.get(name, (0.0, 0.0))
                share = self.draws[:, number]
                found[name] = (before[0] + share * pair[0], before[1] + share * pair[1])
        return found


def told_above(values: Tensor) -> list[list[int]]:
    """Return for each row of figures `[row, resample]` the rows that it is told to be above."""
    lows = (values[:, None] - values[None]).quantile(0.025, dim=-1)
    return [(low > 0).nonzero().flatten().tolist() for low in lows]


def difference(a: Tensor, b: Tensor) -> list[float]:
    """Return the mean of a - b and its 95 % interval, in percent."""
    apart = 100 * (a - b)
    return [round(value, 2) for value in (float(apart.mean()), *percentiles(apart))]
