"""How well a score tells two kinds of examples apart: AUROC, AUPR and FPR95, exact and tie-aware.

Positive are the examples that should have the *higher* score: out-of-distribution ones, or errors.
All three come from the same counts, positives and negatives at each distinct score, in float64. The
scores themselves never enter, only their order: the binary metrics of torchmetrics squeeze scores
outside [0, 1] through a sigmoid, which ties large energies, and divide in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError


def counts_by_score(
    scores: Tensor, positive: Tensor, *, name: str = "data"
) -> tuple[Tensor, Tensor]:
    """Count positives and negatives at each distinct score, from the highest score to the lowest.

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
    return counts_by_rank(dense_ranks(scores), positive)


def counts_by_rank(ranks: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Count positives and negatives at each dense rank, highest first: resampling needs no sort."""
    levels = int(ranks.max()) + 1
    positives = torch.bincount(ranks[positive], minlength=levels).flip(0).double()
    negatives = torch.bincount(ranks[~positive], minlength=levels).flip(0).double()
    return positives, negatives


def dense_ranks(scores: Tensor) -> Tensor:
    """Return each score's place among the distinct scores, 0 for the lowest."""
    return scores.unique(return_inverse=True)[1]


def auroc_of_counts(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return P(positive above negative) + P(tie) / 2, the area under the ROC curve."""
    below = negatives.sum() - negatives.cumsum(0)
    return (positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum())


def aupr_of_counts(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the average precision, sum_k (recall_k - recall_k-1) precision_k."""
    hits = positives.cumsum(0)
    flagged = hits + negatives.cumsum(0)
    return (positives * hits / flagged.clamp_min(1)).sum() / positives.sum()


def fpr_of_counts(positives: Tensor, negatives: Tensor, *, recall: float = 0.95) -> Tensor:
    """Return the share of negatives flagged at the first threshold that reaches the recall."""
    reached = positives.cumsum(0) / positives.sum() >= recall
    # argmax finds the first True; the levels in a resampled set may be empty, which changes nothing
    return negatives.cumsum(0)[reached.int().argmax()] / negatives.sum()


def figures_of_scores(scores: Tensor, positive: Tensor, *, name: str = "data") -> dict[str, float]:
    """Return AUROC, AUPR and both FPR95 of scores; see `counts_by_score` for the arguments."""
    return figures_of_counts(*counts_by_score(scores, positive, name=name))


def ood_figures(id_scores: Tensor, ood_scores: Tensor, *, name: str = "data") -> dict[str, float]:
    """Return all figures of one score between in- and out-of-distribution examples."""
    scores = torch.cat([id_scores, ood_scores])
    positive = torch.arange(len(scores), device=scores.device) >= len(id_scores)
    return figures_of_scores(scores, positive, name=name)


def figures_of_counts(positives: Tensor, negatives: Tensor) -> dict[str, float]:
    """Return AUROC, AUPR and FPR95 in both conventions, by name.

    `FPR95` is the share of good examples flagged when 95 % of the bad ones are: **OOD, or an error,
    is positive**. `FPR95_ID_positive` is the other half of the literature's: the share of bad
    examples that pass when 95 % of the good ones do.
    """
    return {
        "AUROC": float(auroc_of_counts(positives, negatives)),
        "AUPR": float(aupr_of_counts(positives, negatives)),
        "FPR95": float(fpr_of_counts(positives, negatives)),
        "FPR95_ID_positive": float(fpr_of_counts(negatives.flip(0), positives.flip(0))),
    }
