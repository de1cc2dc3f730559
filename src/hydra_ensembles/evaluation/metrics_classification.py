"""Right or wrong, how likely, how calibrated: accuracy, NLL, Brier, ECE and adaptive ECE.

Metrics take member logits `[batch, member, class]` (or `[batch, class]`) and labels `[batch]`, and
are about the mean probability. Sums are in float64: any split of the data gives the same figure.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from ..errors import DataError
from ..uncertainty import log_mean_probability, mean_probability
from .metrics_selective import mean_by_rank

BINS = 15


def is_correct(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return where the most probable class is the label, `[batch]`, bool; lower class on a tie."""
    return mean_probability(member_logits).argmax(-1) == labels


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


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Tensor:
    """Return the ECE with bins of equally many examples (Nixon et al., 2019).

    Examples are sorted by confidence; the first bins take the remainder. Where a tie spans two
    bins, its examples share their mean correctness: the order of the data does not matter.
    """
    levels, ranks = confidence.float().unique(return_inverse=True)
    return adaptive_error_of_ranks(ranks, levels[ranks], correct, bins=bins)


def adaptive_error_of_ranks(
    ranks: Tensor, confidence: Tensor, correct: Tensor, *, bins: int = BINS
) -> Tensor:
    """Return the adaptive ECE given the confidences' dense ranks: resampling needs no sort."""
    gaps = mean_by_rank(ranks, correct.double() - confidence.double())
    return torch.stack([part.sum().abs() for part in gaps.tensor_split(bins)]).sum() / len(gaps)


class MeanMetric(Metric):
    """The mean of one value for each example, as a sum and a count that merge exactly."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add one value for each example."""
        self.total = self.total + values.detach().double().sum()
        self.count = self.count + len(values)

    def compute(self) -> Tensor:
        """Return the mean, a float64 scalar."""
        if int(self.count) == 0:
            raise DataError("No examples were given: call update first.")
        return self.total / self.count


class Accuracy(MeanMetric):
    """Share of examples whose most probable class is the label."""

    higher_is_better = True

    def update(self, member_logits: Tensor, labels: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`, labels `[batch]`."""
        self.add(is_correct(member_logits, labels))


class NLL(MeanMetric):
    """Negative log-likelihood of the mean probability, in nats."""

    higher_is_better = False

    def update(self, member_logits: Tensor, labels: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`, labels `[batch]`."""
        self.add(negative_log_likelihood(member_logits, labels))


class Brier(MeanMetric):
    """Brier score of the mean probability, summed over classes."""

    higher_is_better = False

    def update(self, member_logits: Tensor, labels: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`, labels `[batch]`."""
        self.add(brier(member_logits, labels))


class ECE(Metric):
    """Expected calibration error of the top class, 15 equal-width bins, L1."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    sums: Tensor

    def __init__(self, *, bins: int = BINS) -> None:
        super().__init__()
        self.bins = bins
        zeros = torch.zeros(3, bins + 1, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")

    def update(self, member_logits: Tensor, labels: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`, labels `[batch]`."""
        confidence, predicted = mean_probability(member_logits).max(-1)
        self.sums = self.sums + calibration_bins(confidence, predicted == labels, bins=self.bins)

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        if not bool(self.sums[0].sum()):
            raise DataError("No examples were given: call update first.")
        return expected_calibration_error_of_bins(self.sums)


class AdaptiveECE(Metric):
    """Calibration error of the top class with 15 bins of equally many examples."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, *, bins: int = BINS) -> None:
        super().__init__()
        self.bins = bins
        self.add_state("confidence", default=[], dist_reduce_fx="cat")
        self.add_state("correct", default=[], dist_reduce_fx="cat")

    def update(self, member_logits: Tensor, labels: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`, labels `[batch]`."""
        confidence, predicted = mean_probability(member_logits).max(-1)
        self.confidence.append(confidence.detach())
        self.correct.append(predicted == labels)

    def compute(self) -> Tensor:
        """Return the figure, a float64 scalar."""
        if not len(self.confidence):  # a list, or one tensor after a sync
            raise DataError("No examples were given: call update first.")
        return adaptive_calibration_error(
            dim_zero_cat(self.confidence), dim_zero_cat(self.correct), bins=self.bins
        )
