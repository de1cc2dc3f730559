"""Likelihood and calibration: NLL, Brier, ECE and adaptive ECE.

All are about the mean probability of member logits `[batch, member, class]` (or `[batch, class]`)
and labels `[batch]`. Sums are in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..uncertainty import log_mean_probability, mean_probability
from .metrics_selective import mean_by_rank

BINS = 15


def negative_log_likelihood(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log mean_m p_m(label), `[batch]`, never clipped."""
    return -log_mean_probability(member_logits).gather(-1, labels.long()[:, None])[:, 0]


def brier(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return sum_c (mean_m p_m(c) - [c = label])^2, `[batch]`, in [0, 2] (Brier, 1950)."""
    probability = mean_probability(member_logits)
    target = torch.nn.functional.one_hot(labels.long(), probability.shape[-1])
    return (probability - target).square().sum(-1)


def calibration_bins(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Tensor:
    """Sum up equal-width confidence bins: `[3, bins + 1]` of count, confidence and correct.

    The edges are those of torchmetrics: [a, b) in float32, a confidence of 1 in a bin of its own.
    """
    confidence = confidence.float()
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins)
    rows = torch.stack([torch.ones_like(confidence), confidence, correct.float()]).double()
    sums = torch.zeros(3, bins + 1, dtype=torch.float64, device=confidence.device)
    return sums.index_add(1, index, rows)


def expected_calibration_error_of_bins(sums: Tensor) -> Tensor:
    """Return sum_b n_b / n |accuracy_b - confidence_b| of `calibration_bins`."""
    return (sums[2] - sums[1]).abs().sum() / sums[0].sum()


def expected_calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Tensor:
    """Return the ECE with equal-width bins and the L1 norm (Naeini et al., 2015)."""
    return expected_calibration_error_of_bins(calibration_bins(confidence, correct, bins=bins))


def adaptive_error_of_ranks(
    ranks: Tensor, confidence: Tensor, correct: Tensor, *, bins: int = BINS
) -> Tensor:
    """Return the ECE with bins of equally many examples (Nixon et al., 2019).

    Examples are sorted by confidence; the first bins take the remainder. Where a tie spans two
    bins, its examples share their mean correctness: the order of the data does not matter.

    Args:
        ranks: dense ranks of the confidences, so that resampling needs no sort.
        confidence: `[example]`.
        correct: `[example]`, True where the prediction is right.
        bins: how many.
    """
    gaps = mean_by_rank(ranks, correct.double() - confidence.double())
    return torch.stack([part.sum().abs() for part in gaps.tensor_split(bins)]).sum() / len(gaps)
