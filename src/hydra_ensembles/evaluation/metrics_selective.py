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


def coverage_at_risk(coverage: Tensor, risk: Tensor, at_most: float = 0.05) -> Tensor:
    """Return the largest coverage of a curve with at most this error rate; 0 if there is none."""
    return (coverage * (risk <= at_most)).amax()


def figures_of_ranks(ranks: Tensor, errors: Tensor) -> dict[str, Tensor]:
    """Return the figures of selective classification from dense ranks of the uncertainty.

    `AURC`: the area under the risk-coverage curve (Geifman & El-Yaniv, 2017). `E-AURC`: less that
    of an oracle that ranks every error last, on the same examples (Geifman et al., 2019). `AUGRC`:
    the area under the generalised risk, coverage x risk (Traub et al., 2024). `Cov_5Risk`: the
    largest coverage with at most 5 % errors.
    """
    coverage, risk = curve_of_ranks(ranks, errors)
    area = area_of_curve(coverage, risk)
    oracle = area_of_curve(*curve_of_ranks(errors.long(), errors))
    return {
        "AURC": area,
        "E-AURC": area - oracle,
        "AUGRC": area_of_curve(coverage, risk * coverage),
        "Cov_5Risk": coverage_at_risk(coverage, risk),
    }
