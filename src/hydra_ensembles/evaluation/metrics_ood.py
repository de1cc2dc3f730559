"""How well a score tells two kinds of examples apart: AUROC, AUPR and FPR95, exact and tie-aware.

Positive are the examples that should have the *higher* score: out-of-distribution ones, or errors.
Everything comes from counts of positives and negatives on both sides of a score, in float64. The
scores themselves never enter, only their order: the binary metrics of torchmetrics squeeze scores
outside [0, 1] through a sigmoid, which ties large energies, and divide in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from .ordering import Order, Weighed, once

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
