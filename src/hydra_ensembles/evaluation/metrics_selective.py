"""Selective classification: risk-coverage curves and their areas.

Examples are answered from the least to the most uncertain. **Tied examples share their errors**:
each counts as the mean of its tie, which is the expectation over all orders, so that the order of
the data cannot move a figure (a plain sort would let it). Areas use
the trapezoidal rule over coverages 1/n ... 1, scaled to a support of length one, as
torch-uncertainty does; all in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from .ordering import Order, Weighed, once, sums_before

RISK = 0.05


def risk_coverage(
    uncertainty: Tensor, errors: Tensor, *, name: str = "data"
) -> tuple[Tensor, Tensor]:
    """Return coverages k/n and the error rate among the k surest examples, both `[example]`.

    Args:
        uncertainty: `[example]`, higher when less sure.
        errors: `[example]`, True or 1 where the prediction is wrong.
        name: what errors call the data set.
    """
    if uncertainty.ndim != 1 or uncertainty.shape != errors.shape or len(errors) < 2:
        raise DataError(
            f"Uncertainties of shape {list(uncertainty.shape)} and errors of shape "
            f"{list(errors.shape)} in {name!r}; expected two equally long lists of 2 or more."
        )
    if bool(uncertainty.isnan().any()):
        raise DataError(f"{int(uncertainty.isnan().sum())} uncertainties in {name!r} are NaN.")
    ranks = uncertainty.unique(return_inverse=True)[1]
    counts = torch.bincount(ranks)
    wrong = torch.bincount(ranks, weights=errors.double()) / counts
    wrong = wrong.repeat_interleave(counts)
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64, device=wrong.device)
    return answered / len(wrong), wrong.cumsum(0) / answered


class Selection:
    """Figures of selective classification for any counts of the examples.

    Inside a tie the number of errors grows evenly with the examples, so the sums over all coverages
    are sums over ties: of risks by harmonic numbers, of generalised risks by triangular ones.

    Args:
        order: The examples by uncertainty.
        errors: `[example]`, 1 where the prediction is wrong; in the order of the data.
        at_most: The error rate of the figure `Cov_5Risk`.
    """

    def __init__(self, order: Order, errors: Tensor, *, at_most: float = RISK) -> None:
        self.order, self.at_most = order, at_most
        self.errors = errors[order.rows].double()
        numbers = torch.arange(len(errors) + 1, dtype=torch.float64)
        self.harmonic = (1 / numbers.clamp_min(1)).cumsum(0) - 1

    def figures(self, weighed: Weighed) -> dict[str, Tensor]:
        """Return the figures, each `[draw]`; counts of a draw sum up to the number of examples.

        `AURC`: the area under the risk-coverage curve (Geifman & El-Yaniv, 2017). `E-AURC`: less
        that of an oracle that ranks every error last, on the same examples (Geifman et al., 2019).
        `AUGRC`: the area under the generalised risk, coverage x risk (Traub et al., 2024).
        `Cov_5Risk`: the largest coverage with at most 5 % errors.
        """
        total = len(self.errors)
        answered = self.order.by_tie(weighed.before)
        wrong = self.order.by_tie(sums_before(weighed.counts * self.errors))
        size, rate = answered.diff(dim=1), wrong.diff(dim=1)
        rate = rate / size.clamp_min(1)
        start, missed = answered[:, :-1], wrong[:, :-1]
        spans = self.harmonic[answered.long()].diff(dim=1)
        everything = wrong[:, -1]
        right = total - everything
        first = rate.gather(1, (size > 0).int().argmax(1, keepdim=True))[:, 0]
        risks = (rate * size + (missed - rate * start) * spans).sum(1)
        oracle = everything - right * (self.harmonic[-1] - self.harmonic[right.long()])
        grown = (size * missed + rate * size * (size + 1) / 2).sum(1)
        area = self._area(risks, first, everything / total)
        best = self._area(oracle, (right == 0).double(), everything / total)
        return {
            "AURC": area,
            "E-AURC": area - best,
            "AUGRC": self._area(grown, first, everything) / total,
            "Cov_5Risk": self._coverage(answered, wrong, rate) / total,
        }

    def _area(self, values: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Return the trapezoidal area, scaled to a support of one, of a curve with this sum."""
        return (values - (first + last) / 2) / (len(self.errors) - 1)

    def _coverage(self, answered: Tensor, wrong: Tensor, rate: Tensor) -> Tensor:
        """Return the most examples that can be answered with at most this error rate."""
        excess = wrong - self.at_most * answered
        tiny = 1e-9 * len(self.errors)
        whole = torch.where(excess <= tiny, answered, 0).amax(1)
        # inside a tie the excess grows evenly: answer the part of it before it is positive
        slope = (rate - self.at_most).clamp_min(1e-12)
        part = (answered[:, :-1] - excess[:, :-1] / slope + tiny).floor()
        able = (excess[:, :-1] <= tiny) & (excess[:, 1:] > tiny)
        return torch.maximum(whole, torch.where(able, part, 0).amax(1))


def selective_figures(
    uncertainty: Tensor, errors: Tensor, *, at_most: float = RISK
) -> dict[str, float]:
    """Return the figures of selective classification of `uncertainty` and `errors`, `[example]`."""
    order = Order(uncertainty)
    found = Selection(order, errors, at_most=at_most).figures(order.weigh(once(len(errors))))
    return {key: float(value) for key, value in found.items()}
