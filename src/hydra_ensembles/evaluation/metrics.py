"""Selective classification: risk-coverage curves and their areas.

Examples are answered from the least to the most uncertain. **Tied examples share their errors**:
each counts as the mean of its tie, which is the expectation over all orders, so that the order of
the data cannot move a figure (a plain sort would let it). Areas use
the trapezoidal rule over coverages 1/n ... 1, scaled to a support of length one, as
torch-uncertainty does; all in float64.

Ranked examples under many weightings at once, so that resampling needs no sort and no loop.

A draw with replacement is a row of counts: how often each example is in it. All figures are
functions of such rows `[draw, example]`; the figures of the data itself are those of ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from ..uncertainty import log_mean_probability, mean_probability


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


# Likelihood and calibration: NLL, Brier, ECE and adaptive ECE.
#
# All are about the mean probability of member logits `[batch, member, class]` (or `[batch, class]`)
# and labels `[batch]`. Sums are in float64.
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


# How well a score tells two kinds of examples apart: AUROC, AUPR and FPR95, exact and tie-aware.
#
# Positive examples should have the *higher* score: out-of-distribution ones, or errors.
# Everything comes from counts of positives and negatives on both sides of a score, in float64. The
# scores themselves never enter, only their order: the binary metrics of torchmetrics squeeze scores
# outside [0, 1] through a sigmoid, which ties large energies, and divide in float32.
RECALL = 0.95


class Separation:
    """Where positives stand among negatives; figures for any counts of both.

    Args:
        negatives, positives: The scores of both kinds.
    """

    def __init__(self, negatives: Order, positives: Order) -> None:
        self.lower = negatives.below(positives.values)
        self.not_higher = negatives.up_to(positives.values)
        self.own_lower = positives.below(positives.values)
        self.passing = positives.up_to(negatives.values)

    def figures(self, negatives: Weighed, positives: Weighed) -> dict[str, Tensor]:
        """Return AUROC, AUPR and FPR95 in both conventions, each `[draw]`; NaN without both kinds.

        `FPR95` is the share of good examples flagged when 95 % of the bad ones are: **OOD, or an
        error, is positive**. `FPR95_ID_positive` is the other half of the literature's: the share
        of bad examples that pass when 95 % of the good ones do.
        """
        good, bad = negatives.before[:, -1:], positives.before[:, -1:]
        below = negatives.before.index_select(1, self.lower)
        level = negatives.before.index_select(1, self.not_higher)
        pairs = (positives.counts * (below + level)).sum(1, keepdim=True) / 2
        hits = bad - positives.before.index_select(1, self.own_lower)
        # where a positive is drawn it is flagged itself, elsewhere its count is 0
        precision = hits / (hits + good - below).clamp_min(1)
        # the lowest-scored positive at which the recall is still reached, and the same from below
        last = torch.searchsorted(positives.before, bad - _reaching(bad), right=True) - 1
        flagged = good - below.gather(1, last.clamp_max(below.shape[1] - 1))
        first = torch.searchsorted(negatives.before, _reaching(good)) - 1
        passed = positives.before.gather(1, self.passing[first.clamp_min(0)])
        found = {
            "AUROC": pairs / (good * bad),
            "AUPR": (positives.counts * precision).sum(1, keepdim=True) / bad,
            "FPR95": flagged / good,
            "FPR95_ID_positive": passed / bad,
        }
        none = (good * bad == 0)[:, 0]
        return {key: value[:, 0].masked_fill(none, torch.nan) for key, value in found.items()}


def _reaching(total: Tensor) -> Tensor:
    """Return the fewest of `total` examples that are at least 95 % of them."""
    return (RECALL * total - 1e-9).ceil()


def figures_of_scores(scores: Tensor, positive: Tensor, *, name: str = "data") -> dict[str, float]:
    """Return AUROC, AUPR and both FPR95 of scores.

    Args:
        scores: `[example]`.
        positive: `[example]`, True for positive.
        name: what errors call the data set.

    Raises:
        DataError: for NaN, for unequal lengths, and when all examples are of one kind.
    """
    if scores.ndim != 1 or scores.shape != positive.shape:
        raise DataError(
            f"Scores of shape {list(scores.shape)} and targets of shape {list(positive.shape)} in "
            f"{name!r}; expected two equally long lists of numbers."
        )
    if bool(scores.isnan().any()):
        raise DataError(f"{int(scores.isnan().sum())} scores in {name!r} are NaN.")
    positive = positive.bool()
    share = int(positive.sum())
    if share in (0, len(positive)):
        raise DataError(
            f"All {len(positive)} examples in {name!r} are {'positive' if share else 'negative'}: "
            "AUROC, AUPR and FPR95 need both kinds (in- and out-of-distribution, right and wrong)."
        )
    good, bad = Order(scores[~positive].cpu()), Order(scores[positive].cpu())
    found = Separation(good, bad).figures(
        good.weigh(once(len(good.rows))), bad.weigh(once(len(bad.rows)))
    )
    return {key: float(value) for key, value in found.items()}


def ood_figures(id_scores: Tensor, ood_scores: Tensor, *, name: str = "data") -> dict[str, float]:
    """Return all figures of one score between in- and out-of-distribution examples."""
    scores = torch.cat([id_scores, ood_scores])
    positive = torch.arange(len(scores), device=scores.device) >= len(id_scores)
    return figures_of_scores(scores, positive, name=name)


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
        # the most examples that can be answered with at most this error rate
        excess = wrong - self.at_most * answered
        tiny = 1e-9 * total
        whole = torch.where(excess <= tiny, answered, 0).amax(1)
        # inside a tie the excess grows evenly: answer the part of it before it is positive
        slope = (rate - self.at_most).clamp_min(1e-12)
        part = (start - excess[:, :-1] / slope + tiny).floor()
        able = (excess[:, :-1] <= tiny) & (excess[:, 1:] > tiny)
        return {
            "AURC": area,
            "E-AURC": area - best,
            "AUGRC": self._area(grown, first, everything) / total,
            "Cov_5Risk": torch.maximum(whole, torch.where(able, part, 0).amax(1)) / total,
        }

    def _area(self, values: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Return the trapezoidal area, scaled to a support of one, of a curve with this sum."""
        return (values - (first + last) / 2) / (len(self.errors) - 1)
