"""Metrics of tasks other than one class per input, and of prediction sets.

Like those of `metrics.py` they are functions of counts `[draw, example]`, so that resampling needs
no sort and no loop over draws; the figures of the data itself are those of ones. In float64.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..task_predictions import entities_of as entities_of
from .metrics import BINS, Order, Separation, bin_of

LEVEL = 0.9
"""Coverage of the central intervals that numbers are judged by."""
EDGES = (0.5, 0.8, 0.95)
"""Ends of the bins of novelty in which coverage is reported."""
SIZES = 12
"""Most sizes of sets that are reported one by one; beyond it, and for widths, in three parts."""


class LabelFigures:
    """Several labels per input: mAP, F1, likelihood and calibration per label.

    Args:
        probabilities: `[example, label]`.
        targets: Which labels are true, `[example, label]`.
        active: Which labels are predicted, `[example, label]`.
    """

    def __init__(self, probabilities: Tensor, targets: Tensor, active: Tensor) -> None:
        chances, true = probabilities.double(), targets.bool()
        said = active.bool()
        self.hits, self.said, self.true = (x.double() for x in (said & true, said, true))
        logs = torch.where(true, chances.log(), torch.log1p(-chances))
        self.losses = torch.stack(
            [
                -logs.mean(1),
                (chances - self.true).square().mean(1),
                (said == true).double().mean(1),
                (said == true).all(1).double(),
            ],
            1,
        )
        self.kinds = []
        for label in range(chances.shape[1]):
            positive, negative = (m.nonzero().flatten() for m in (true[:, label], ~true[:, label]))
            column = chances[:, label]
            kinds = Order(column[negative], negative), Order(column[positive], positive)
            gap = self.true[:, label] - column.float().double()
            bins = torch.nn.functional.one_hot(bin_of(column), BINS + 1) * gap[:, None]
            apart = Separation(*kinds) if len(positive) and len(negative) else None
            self.kinds.append((*kinds, apart, bins))

    def figures(self, counts: Tensor) -> dict[str, Tensor]:
        """Return the figures, each `[draw]`.

        `cls/mAP` is the mean over labels that are true somewhere, `cls/F1_macro` over labels that
        are true or predicted somewhere, `cal/ECE` the mean of the labels' own. `cls/Acc` counts
        inputs with all labels right, `cls/NLL` and `cls/Brier` are means over labels.
        """
        size = counts.shape[1]
        nll, squares, agreeing, exact = (counts @ self.losses / size).unbind(1)
        hits, said, true = (counts @ x for x in (self.hits, self.said, self.true))
        by_label = 2 * hits / (said + true)  # NaN where a label is neither true nor predicted
        precisions, gaps = [], []
        for negative, positive, apart, bins in self.kinds:
            if apart is not None:
                kinds = negative.weigh(counts), positive.weigh(counts)
                precisions.append(apart.figures(*kinds)["AUPR"])
            elif len(positive.rows):  # true everywhere: every precision is 1
                precisions.append(counts.new_ones(len(counts)))
            gaps.append((counts @ bins).abs().sum(1) / size)
        return {
            "cls/Acc": exact,
            "cls/LabelAcc": agreeing,
            "cls/mAP": torch.stack(precisions or [nll * torch.nan]).nanmean(0),
            "cls/F1_micro": 2 * hits.sum(1) / (said + true).sum(1),
            "cls/F1_macro": by_label.nanmean(1),
            "cls/NLL": nll,
            "cls/Brier": squares,
            "cal/ECE": torch.stack(gaps).mean(0),
        }


class NumberFigures:
    """One or several numbers per input: errors, scores of the distribution, correlations.

    With sigma an answer is a normal distribution, and without the members' numbers are a sample.

    Args:
        values: Answers `[example, number]`.
        targets: True numbers, of the same shape.
        sigma: Standard deviations of the answers, of the same shape, above 0; or None.
        members: What each member answered, `[example, member, number]`; or None.
        uncertainty: What is to rank the errors, `[example]`; or None.
    """

    def __init__(
        self,
        values: Tensor,
        targets: Tensor,
        *,
        sigma: Tensor | None = None,
        members: Tensor | None = None,
        uncertainty: Tensor | None = None,
    ) -> None:
        answers, true = values.double(), targets.double()
        error = answers - true
        means = {"reg/MSE": error.square().mean(1), "reg/MAE": error.abs().mean(1)}
        if sigma is not None:
            wide = sigma.double()
            half = wide * float(
                torch.special.ndtri(torch.tensor((1 + LEVEL) / 2, dtype=torch.float64))
            )
            means |= {
                "reg/NLL": (wide.log() + (error / wide) ** 2 / 2).mean(1)
                + math.log(2 * math.pi) / 2,
                "reg/CRPS": crps_of_normal(error, wide).mean(1),
                "reg/IntervalScore": interval_score(answers - half, answers + half, true).mean(1),
                "reg/Coverage": (error.abs() <= half).double().mean(1),
                "reg/Width": 2 * half.mean(1),
            }
        if members is not None and members.shape[1] > 1:
            means["reg/CRPS_members"] = crps_of_sample(members.double(), true).mean(1)
        self.names, self.means = list(means), torch.stack(list(means.values()), 1)
        self.pairs = [
            (answers[:, k], true[:, k], Order(answers[:, k]), Order(true[:, k]))
            for k in range(answers.shape[1])
        ]
        self.ranked: tuple[Order, Order] | None = None
        if uncertainty is not None and len(uncertainty.unique()) > 1:
            self.ranked = Order(uncertainty.double()), Order(error.abs().mean(1))

    def figures(self, counts: Tensor) -> dict[str, Tensor]:
        """Return the figures, each `[draw]`.

        `reg/NLL`, `reg/CRPS`, `reg/IntervalScore`, `reg/Coverage` and `reg/Width` are of a normal
        distribution (its central 90 % interval), `reg/CRPS_members` of the members as a sample.
        `reg/ErrorRank` is Spearman's correlation of the absolute error and the uncertainty.
        """
        found = dict(
            zip(self.names, (counts @ self.means / counts.shape[1]).unbind(1), strict=True)
        )
        found = {"reg/RMSE": found.pop("reg/MSE").sqrt(), **found}
        if len(counts[0]) > 1:
            pearson = [correlation(a, b, counts) for a, b, _, _ in self.pairs]
            ranks = [rank_correlation(a, b, counts) for _, _, a, b in self.pairs]
            found["reg/Pearson"] = torch.stack(pearson).mean(0)
            found["reg/Spearman"] = torch.stack(ranks).mean(0)
            if self.ranked is not None:
                found["reg/ErrorRank"] = rank_correlation(*self.ranked, counts)
        return found


class EntityFigures:
    """Entities of texts: precision, recall and F1 over all of them, as conlleval counts.

    Args:
        counts_by_text: Right, predicted and true entities of each text, `[text, 3]`; where examples
            are tokens, each text's at its first token and 0 elsewhere.
        wrong: 1 where a wrong entity is predicted, 0 where a right one, else -1, `[text]`; or None.
        uncertainty: How unsure the predicted entities are, `[text]`; or None.
    """

    def __init__(
        self,
        counts_by_text: Tensor,
        *,
        wrong: Tensor | None = None,
        uncertainty: Tensor | None = None,
    ) -> None:
        self.counts = counts_by_text.double()
        self.errors: tuple[Order, Order] | None = None
        if wrong is not None and uncertainty is not None:
            right, false = ((wrong == kind).nonzero().flatten() for kind in (0, 1))
            if len(right) and len(false):
                scores = uncertainty.double()
                self.errors = Order(scores[right], right), Order(scores[false], false)
                self.apart = Separation(*self.errors)

    def figures(self, counts: Tensor) -> dict[str, Tensor]:
        """Return the figures, each `[draw]`; 0 where nothing is predicted, as seqeval has it.

        `ent/AUROC` says how well uncertainty ranks wrong predicted entities above right ones.
        """
        right, said, true = (counts @ self.counts).unbind(1)
        found = {
            "ent/F1": 2 * right / (said + true).clamp_min(1),
            "ent/Precision": right / said.clamp_min(1),
            "ent/Recall": right / true.clamp_min(1),
        }
        if self.errors is not None:
            kinds = (order.weigh(counts) for order in self.errors)
            found["ent/AUROC"] = self.apart.figures(*kinds)["AUROC"]
        return found


class SetFigures:
    """Prediction sets: coverage, size, coverage by class and by novelty.

    Args:
        covered: Whether, or what share of, an example's true answers are in its set, `[example]`.
        size: Classes in the set, or width of the interval, `[example]`.
        labels: Classes `[example]`; or None.
        novelty: `[example]`, in [0, 1]; or None.
    """

    def __init__(
        self,
        covered: Tensor,
        size: Tensor,
        *,
        labels: Tensor | None = None,
        novelty: Tensor | None = None,
    ) -> None:
        inside = covered.double()
        self.values = torch.stack([inside, size.double()], 1)
        groups = {"set/WorstSize": torch.stack([*by_size(size).values()], 1)}
        if labels is not None and labels.ndim == 1:
            groups["set/WorstClass"] = torch.nn.functional.one_hot(labels.long())
        if novelty is not None:
            groups |= {
                f"set/Coverage_novelty_{name}": chosen[:, None]
                for name, chosen in by_novelty(novelty).items()
            }
        self.groups = {
            name: (chosen.double(), chosen * inside[:, None]) for name, chosen in groups.items()
        }

    def figures(self, counts: Tensor) -> dict[str, Tensor]:
        """Return the figures, each `[draw]`; NaN for a bin of novelty without examples.

        `set/WorstClass` is the lowest coverage of a class, `set/WorstSize` of the sets of one size
        (Angelopoulos et al., 2021), or of a third of the intervals by their width.
        """
        coverage, size = (counts @ self.values / counts.shape[1]).unbind(1)
        found = {"set/Coverage": coverage, "set/Size": size}
        for name, (members, inside) in self.groups.items():
            shares = (counts @ inside) / (counts @ members)
            found[name] = shares.nan_to_num(torch.inf).amin(1)
            found[name] = found[name].masked_fill(found[name].isinf(), torch.nan)
        return found


def by_size(size: Tensor) -> dict[str, Tensor]:
    """Return which examples have a set of each size, bool `[example]`, or of each third by size."""
    found = size.unique()
    if len(found) <= SIZES:
        return {f"{float(value):.4g}": size == value for value in found}
    parts = size.sort().values.tensor_split(3)
    starts = torch.stack([part[0] for part in parts[1:]])
    place = torch.bucketize(size, starts, right=True)
    return {
        f"{float(size[place == k].min()):.3g} to {float(size[place == k].max()):.3g}": place == k
        for k in place.unique()
    }


def by_novelty(novelty: Tensor) -> dict[str, Tensor]:
    """Return which examples are in each bin of novelty, bool `[example]`."""
    place = torch.bucketize(novelty.double(), torch.tensor(EDGES).double(), right=True)
    ends = zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)
    return {f"{low:g}-{high:g}": place == k for k, (low, high) in enumerate(ends)}


def crps_of_normal(error: Tensor, sigma: Tensor) -> Tensor:
    """Return the CRPS of a normal distribution (Gneiting & Raftery, 2007), lower is better.

    sigma (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = error / sigma.
    """
    z = error / sigma
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return sigma * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))


def crps_of_sample(members: Tensor, targets: Tensor) -> Tensor:
    """Return the CRPS of members as a sample, mean |x - y| - mean |x - x'| / 2.

    Args:
        members: `[example, member, ...]`.
        targets: `[example, ...]`.
    """
    apart = (members[:, :, None] - members[:, None]).abs().mean((1, 2))
    return (members - targets[:, None]).abs().mean(1) - apart / 2


def interval_score(low: Tensor, high: Tensor, targets: Tensor, *, level: float = LEVEL) -> Tensor:
    """Return the width plus 2 / (1 - level) times the distance outside (Winkler, 1972)."""
    outside = (low - targets).clamp_min(0) + (targets - high).clamp_min(0)
    return high - low + 2 / (1 - level) * outside


def correlation(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Return Pearson's correlation of values, `[draw]`; values are `[example]` or `[draw, ...]`."""
    total = counts.sum(1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        return values - (counts * values).sum(1, keepdim=True) / total

    x, y = centred(a), centred(b)
    shared = (counts * x * y).sum(1)
    return shared / ((counts * x * x).sum(1) * (counts * y * y).sum(1)).sqrt()


def rank_correlation(a: Order, b: Order, counts: Tensor) -> Tensor:
    """Return Spearman's correlation of two orders of the same examples, `[draw]`."""
    return correlation(_ranks(a, counts), _ranks(b, counts), counts)


def _ranks(order: Order, counts: Tensor) -> Tensor:
    """Return each example's mean rank in each draw, `[draw, example]`; ties share theirs."""
    ends = order.by_tie(order.weigh(counts).before)
    middles = (ends[:, :-1] + ends[:, 1:]) / 2
    places = torch.searchsorted(order.ends, torch.arange(len(order.rows)))
    ranks = torch.empty_like(counts)
    ranks[:, order.rows] = middles[:, places]
    return ranks


def entity_counts(predicted: Sequence[str], true: Sequence[str]) -> tuple[int, int, int]:
    """Return how many entities of a text are right, predicted and true."""
    said, meant = entities_of(predicted), entities_of(true)
    return len(said & meant), len(said), len(meant)


def plain_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and spaces, as SQuAD's script."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """Return 1 where an answer is one of the references, normalised as SQuAD's script does."""
    return float(any(plain_answer(answer) == plain_answer(text) for text in references))


def answer_f1(answer: str, references: Iterable[str]) -> float:
    """Return the best F1 of an answer's words with a reference, as SQuAD's script has it.

    Two empty texts ("no answer") agree, an empty and another one do not.
    """
    return max(_word_f1(plain_answer(answer).split(), plain_answer(t).split()) for t in references)


def _word_f1(said: list[str], meant: list[str]) -> float:
    if not said or not meant:
        return float(said == meant)
    shared = sum((Counter(said) & Counter(meant)).values())
    return 2 * shared / (len(said) + len(meant))
