"""Drift: has a stream left the known data? A two-sample test over windows of novelty scores.

Every full window of w scores is compared with the n held-out scores of the known data by the
Kolmogorov-Smirnov statistic (the largest gap between the two distribution functions). Its p-value
comes from permutations: with B random relabellings of the n + w scores, p = (1 + #{gap as large}) /
(B + 1). It is valid for any n, w and distribution when the stream is exchangeable with the known
data: the chance of a false alarm in a window is at most `rate`. No window is tested twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..prediction import Prediction

PERMUTATIONS = 1999
CHUNK = 100


def ks_gaps(labels: Tensor) -> Tensor:
    """Return the KS statistic of two samples, from 0/1 labels in the order of the pooled values.

    Args:
        labels: 1 where a value belongs to the window, `[..., pooled]`, ordered by value.
    """
    window = labels.double()
    known = 1 - window
    gap = window.cumsum(-1) / window.sum(-1, keepdim=True)
    gap = gap - known.cumsum(-1) / known.sum(-1, keepdim=True)
    return gap.abs().amax(-1)


def ks_test(known: Tensor, window: Tensor, *, seed: int = 0) -> tuple[float, float]:
    """Return the KS statistic of two samples and its permutation p-value (ties at random)."""
    draw = torch.Generator().manual_seed(seed)
    pooled = torch.cat([known.double(), window.double()])
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(window))])
    shuffled = torch.randperm(len(pooled), generator=draw)  # tied values in a random order
    order = shuffled[pooled[shuffled].argsort(stable=True)]
    gap = float(ks_gaps(labels[order]))
    as_large = 0
    for first in range(0, PERMUTATIONS, CHUNK):  # all at once would take some hundred megabytes
        rows = min(CHUNK, PERMUTATIONS - first)
        share = torch.rand(rows, len(pooled), generator=draw).argsort(-1)
        as_large += int((ks_gaps(labels[share]) >= gap - 1e-12).sum())
    return gap, (1 + as_large) / (PERMUTATIONS + 1)


@dataclass(frozen=True)
class Window:
    """One tested window of a stream.

    Attributes:
        end: Examples seen when it was full.
        gap: The KS statistic, in [0, 1].
        p: Its p-value.
        alarms: Share of the window with novelty above 0.95; 5 % is expected.
        drifted: Whether p is at most the rate.
    """

    end: int
    gap: float
    p: float
    alarms: float
    drifted: bool

    def __str__(self) -> str:
        verdict = "DRIFT" if self.drifted else "no drift"
        return (
            f"{verdict} in the window that ends at example {self.end}: p = {self.p:.4f}, "
            f"{self.alarms:.1%} of it newer than 95 % of the known data"
        )


class Drift:
    """Watch a stream of predictions; say when it has left the known data.

    Args:
        ensemble: An ensemble with novelty fitted.
        window: Examples per test; more see smaller drifts, later.
        rate: Chance of a false alarm per window, for a stream like the known data.
        seed: Of the permutations.

    Example:
        >>> drift = Drift(ensemble, window=500)
        >>> for batch in stream:
        ...     if drift.add(ensemble.predict(batch)):
        ...         print(drift)
    """

    def __init__(
        self, ensemble: Any, *, window: int = 500, rate: float = 0.01, seed: int = 0
    ) -> None:
        novelty = ensemble.novelty
        if novelty is None:
            raise DataError("Drift needs novelty: call ensemble.fit_novelty_(known) first.")
        if window < 20:
            raise ValueError(f"window={window}: expected at least 20 examples.")
        if not 1 / (PERMUTATIONS + 1) <= rate < 1:
            raise ValueError(f"rate={rate}: expected {1 / (PERMUTATIONS + 1)} to 1, such as 0.01.")
        self.window, self.rate, self.seed = window, rate, seed
        self.windows: list[Window] = []
        self._known = novelty.sums.values[0].cpu()
        self._level = self._known.quantile(0.95)
        self._waiting: list[Tensor] = []
        self.seen = 0

    @property
    def drifted(self) -> bool:
        """Whether any window so far has drifted."""
        return any(window.drifted for window in self.windows)

    def add(self, prediction: Prediction) -> bool:
        """Add a prediction of the stream; return whether a window that it fills has drifted."""
        if prediction.novelty_score is None:
            raise DataError("The prediction holds no novelty: predict with the fitted ensemble.")
        return self.add_scores(prediction.novelty_score)

    def add_scores(self, scores: Tensor | Sequence[float]) -> bool:
        """Add novelty scores `[example]`; see `add`."""
        self._waiting.append(torch.as_tensor(scores).detach().float().cpu())
        pooled = torch.cat(self._waiting)
        before = len(self.windows)
        while len(pooled) >= self.window:
            part, pooled = pooled[: self.window], pooled[self.window :]
            self.seen += self.window
            gap, p = ks_test(self._known, part, seed=self.seed + len(self.windows))
            alarms = float((part > self._level).double().mean())
            self.windows.append(Window(self.seen, gap, p, alarms, p <= self.rate))
        self._waiting = [pooled]
        return any(window.drifted for window in self.windows[before:])

    def __repr__(self) -> str:
        head = (
            f"Drift over windows of {self.window} examples, false alarms at most {self.rate:.1%} "
            f"of them: {sum(w.drifted for w in self.windows)} of {len(self.windows)} drifted"
        )
        return "\n".join([head, *(f"  {window}" for window in self.windows[-5:])])
