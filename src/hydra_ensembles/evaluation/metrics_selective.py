"""What is gained by answering only when sure: risk-coverage curves and their areas.

Examples are answered from the least to the most uncertain. **Tied examples share their errors**:
each counts as the mean of its tie, which is the expectation over all orders, so that neither the
order of the data nor that of merged states can move a figure (a plain sort would let it). Areas use
the trapezoidal rule over coverages 1/n ... 1, scaled to a support of length one, as
torch-uncertainty does; all in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from ..errors import DataError


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
    return curve_of_ranks(uncertainty.unique(return_inverse=True)[1], errors)


def curve_of_ranks(ranks: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the risk-coverage curve of dense ranks `[example]`: resampling needs no sort."""
    wrong = mean_by_rank(ranks, errors)
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64, device=wrong.device)
    return answered / len(wrong), wrong.cumsum(0) / answered


def mean_by_rank(ranks: Tensor, values: Tensor) -> Tensor:
    """Return values from the lowest rank up, each as the mean of its tie, `[example]`."""
    counts = torch.bincount(ranks)
    means = torch.bincount(ranks, weights=values.double()) / counts.clamp_min(1)
    return means.repeat_interleave(counts)


def area_of_curve(coverage: Tensor, risk: Tensor) -> Tensor:
    """Return the area under a curve that starts at coverage 1/n, scaled to a support of one."""
    return torch.trapezoid(risk, coverage) / (1 - 1 / len(coverage))


def aurc(uncertainty: Tensor, errors: Tensor, *, name: str = "data") -> Tensor:
    """Return the area under the risk-coverage curve (Geifman & El-Yaniv, 2017)."""
    return area_of_curve(*risk_coverage(uncertainty, errors, name=name))


def excess_aurc(uncertainty: Tensor, errors: Tensor, *, name: str = "data") -> Tensor:
    """Return AURC less that of an oracle that ranks every error last (Geifman et al., 2019).

    The oracle's area is that of the same examples, not its large-sample approximation.
    """
    return aurc(uncertainty, errors, name=name) - aurc(errors.double(), errors, name=name)


def augrc(uncertainty: Tensor, errors: Tensor, *, name: str = "data") -> Tensor:
    """Return the area under the generalised risk, coverage x risk (Traub et al., 2024)."""
    coverage, risk = risk_coverage(uncertainty, errors, name=name)
    return area_of_curve(coverage, risk * coverage)


def coverage_at_risk(
    uncertainty: Tensor, errors: Tensor, *, risk: float = 0.05, name: str = "data"
) -> Tensor:
    """Return the largest coverage with an error rate of at most `risk`; 0 when there is none."""
    coverage, risks = risk_coverage(uncertainty, errors, name=name)
    return (coverage * (risks <= risk)).amax()


class _Selective(Metric):
    """Keep uncertainties and errors of all examples, in order."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    uncertainty: list[Tensor]
    errors: list[Tensor]

    def __init__(self, *, data_name: str = "data") -> None:
        super().__init__()
        self.data_name = data_name
        self.add_state("uncertainty", default=[], dist_reduce_fx="cat")
        self.add_state("errors", default=[], dist_reduce_fx="cat")

    def update(self, uncertainty: Tensor, errors: Tensor) -> None:
        """Add examples: `uncertainty` `[batch]`; `errors` `[batch]`, True where wrong."""
        self.uncertainty.append(uncertainty.detach())
        self.errors.append(errors.detach().bool())

    def collected(self) -> tuple[Tensor, Tensor]:
        """Return all uncertainties and errors so far."""
        if not len(self.errors):  # a list, or one tensor after a sync
            raise DataError(f"No examples of {self.data_name!r} were given: call update first.")
        return dim_zero_cat(self.uncertainty), dim_zero_cat(self.errors)


class AURC(_Selective):
    """Area under the risk-coverage curve."""

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        return aurc(*self.collected(), name=self.data_name)


class ExcessAURC(_Selective):
    """AURC less an oracle's (E-AURC)."""

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        return excess_aurc(*self.collected(), name=self.data_name)


class AUGRC(_Selective):
    """Area under the generalised risk-coverage curve."""

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        return augrc(*self.collected(), name=self.data_name)


class CoverageAtRisk(_Selective):
    """Largest coverage with at most the given error rate."""

    higher_is_better = True

    def __init__(self, *, risk: float = 0.05, data_name: str = "data") -> None:
        super().__init__(data_name=data_name)
        self.risk = risk

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        return coverage_at_risk(*self.collected(), risk=self.risk, name=self.data_name)
