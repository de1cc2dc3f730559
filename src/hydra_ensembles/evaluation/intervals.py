"""95 % intervals: percentiles of bootstrap draws, and Student's t where draws are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def percentiles(draws: Tensor, *, level: float = 0.95) -> tuple[float, float]:
    """Return the central interval of a figure's draws; NaN draws do not count."""
    tail = (1 - level) / 2
    low, high = draws.double().nanquantile(torch.tensor([tail, 1 - tail]).double()).tolist()
    return low, high


def bootstrap(
    values: Sequence[float], statistic: Callable[[Tensor], Tensor], *, seed: int = 0
) -> Interval:
    """Resample values with replacement (Efron, 1979).

    Args:
        values: The sample.
        statistic: `[draw, value]` to `[draw]`, such as a median over the last dimension.
        seed: Of the draws.
    """
    sample = torch.tensor(list(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(sample), (RESAMPLES, len(sample)), generator=generator)
    return Interval(float(statistic(sample[None])), *percentiles(statistic(sample[picked])))


def two_way_bootstrap(hits: Tensor, *, seed: int = 0) -> Interval:
    """Resample draws and examples together: the mean of `hits` `[draw, example]`."""
    generator = torch.Generator().manual_seed(seed)

    def shares(size: int) -> Tensor:
        picked = torch.randint(size, (RESAMPLES, size), generator=generator)
        counts = torch.zeros(RESAMPLES, size, dtype=torch.float64)
        return counts.scatter_add_(1, picked, torch.ones_like(counts)) / size

    draws, examples = hits.shape
    means = ((shares(draws) @ hits) * shares(examples)).sum(1)
    return Interval(float(hits.mean()), *percentiles(means))


def student(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval; a single value has no width."""
    from scipy.special import stdtrit

    sample = torch.tensor(list(values), dtype=torch.float64)
    mean, freedom = float(sample.mean()), len(sample) - 1
    if freedom < 1:
        return Interval(mean, mean, mean)
    half = float(stdtrit(freedom, 0.975)) * float(sample.std()) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)
