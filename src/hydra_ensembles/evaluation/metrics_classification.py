"""Likelihood and calibration: NLL, Brier, ECE and adaptive ECE.

All are about the mean probability of member logits `[batch, member, class]` (or `[batch, class]`)
and labels `[batch]`. Sums are in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..uncertainty import log_mean_probability, mean_probability
from .ordering import Order, sums_before

BINS = 15


def negative_log_likelihood(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log mean_m p_m(label), `[batch]`, never clipped."""
    return -log_mean_probability(member_logits).gather(-1, labels.long()[:, None])[:, 0]


def brier(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return sum_c (mean_m p_m(c) - [c = label])^2, `[batch]`, in [0, 2] (Brier, 1950)."""
    probability = mean_probability(member_logits)
    target = torch.nn.functional.one_hot(labels.long(), probability.shape[-1])
    return (probability - target).square().sum(-1)


def bin_of(confidence: Tensor, *, bins: int = BINS) -> Tensor:
    """Return each confidence's bin, 0 to `bins`, `[example]`.

    The edges are those of torchmetrics: [a, b) in float32, a confidence of 1 in a bin of its own.
    """
    confidence = confidence.float()
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    return (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins)


def calibration_bins(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Tensor:
    """Sum up equal-width confidence bins: `[3, bins + 1]` of count, confidence and correct."""
    confidence = confidence.float()
    rows = torch.stack([torch.ones_like(confidence), confidence, correct.float()]).double()
    sums = torch.zeros(3, bins + 1, dtype=torch.float64, device=confidence.device)
    return sums.index_add(1, bin_of(confidence, bins=bins), rows)


def expected_calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Tensor:
    """Return the ECE with equal-width bins and the L1 norm (Naeini et al., 2015)."""
    sums = calibration_bins(confidence, correct, bins=bins)
    return (sums[2] - sums[1]).abs().sum() / sums[0].sum()


class AdaptiveError:
    """The ECE with bins of equally many examples (Nixon et al., 2019), for any counts of them.

    Examples are sorted by confidence; the first bins take the remainder. Where a tie spans two
    bins, its examples share their mean correctness: the order of the data does not matter.

    Args:
        confidence: `[example]`.
        correct: `[example]`, True where the prediction is right.
        bins: how many.
    """

    def __init__(self, confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> None:
        self.order = Order(confidence)
        self.gaps = (correct.double() - confidence.double())[self.order.rows]
        sizes = torch.tensor([len(part) for part in torch.arange(len(correct)).tensor_split(bins)])
        self.edges = sizes.cumsum(0).double()

    def figure(self, counts: Tensor) -> Tensor:
        """Return the error of each row of counts `[draw, example]`, `[draw]`."""
        weighed = self.order.weigh(counts)
        sizes = self.order.by_tie(weighed.before)
        gaps = self.order.by_tie(sums_before(weighed.counts * self.gaps))
        edges = self.edges.expand(len(counts), -1).contiguous()
        tie = torch.searchsorted(sizes, edges).clamp_min(1)  # no edge lies before the first example
        size, gap = sizes.gather(1, tie - 1), gaps.gather(1, tie - 1)
        share = (edges - size) / (sizes.gather(1, tie) - size).clamp_min(1)
        sums = gap + share * (gaps.gather(1, tie) - gap)
        return sums.diff(dim=1, prepend=sums.new_zeros(len(sums), 1)).abs().sum(1) / len(self.gaps)
