"""Choose the thresholds of sets with a guarantee on held-out examples (split conformal).

Everything here is one statement, conformal risk control (Angelopoulos, Bates, Fisch, Lei &
Schuster, 2024, theorem 1): with n held-out examples whose losses fall as the threshold t rises,

    t = inf { t : (n R(t) + 1) / (n + 1) <= 1 - coverage },   R(t) the mean loss of the examples

keeps the expected loss of a further, exchangeable example at most 1 - coverage. An example's loss
is the share of what is true of it that scores above t:

- one class, one number, one span: 0 or 1, and t is the ceil((n + 1) coverage)-th smallest score,
  the quantile of split conformal prediction;
- several labels: the share of the true labels that is missed (false negatives);
- tokens: the share of a text's labelled tokens whose label is not in the token's set. The tokens of
  a text are not exchangeable, but texts are: a text is one example.

By class or group, the same among the examples that have the class or group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ..prediction import Prediction, as_numpy
from ..prediction_sets import (
    IGNORED,
    RANDOMISED,
    Array,
    Sets,
    adaptive_scores,
    least_examples,
    likely_spans,
)
from ..task_predictions import (
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""Penalties of `raps` that are tried, as its authors do."""
SHARE = {"raps": 0.2, "normalised": 1 / 3}
"""Share of the held-out examples on which a method's options are chosen."""
FLOOR = 0.05
"""The least sigma, in mean errors."""


class TrueScores(NamedTuple):
    """What is true of the held-out examples: one entry for each class, label, number or token.

    Attributes:
        score: How badly it fits, by the method.
        example: Whose it is.
        column: Its class (by class), or which number it is.
    """

    score: Array
    example: Array
    column: Array


def choose_sets(
    answer: Prediction,
    labels: Any,
    *,
    method: str,
    coverage: float = 0.9,
    groups: str | Sequence[Any] | None = None,
    randomised: bool = False,
    seed: int = 0,
    longest: int = 30,
) -> Sets:
    """Choose thresholds from answers to labelled examples; `fit_sets` does this for a model.

    Args:
        answer: The answers to the held-out examples.
        labels: As `Task.check_labels` returns them.
        method: As in `Sets`.
        coverage: In (0, 1).
        groups: `"class"` for a threshold for each class, or the name of each example's group.
        randomised: For `aps` and `raps`: smaller sets, whose coverage is exact and not more.
        seed: Of the share that options are chosen on, and of the random numbers.
        longest: Most tokens of a span.
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage={coverage}: expected a number between 0 and 1, such as 0.9.")
    if randomised and method not in RANDOMISED:
        raise ValueError(f"randomised=True is for {' and '.join(RANDOMISED)}, not for {method!r}.")
    answer, labels = answer.to_numpy(), as_numpy(labels)
    by = "all" if groups is None else "class" if isinstance(groups, str) else "group"
    classes = not isinstance(answer, (RegressionPrediction, SpanPrediction))
    if isinstance(groups, str) and groups != "class":
        raise ValueError(f'groups={groups!r}: expected "class", or one name for each example.')
    if by == "class" and not classes:
        raise ValueError('groups="class" needs classes or labels; give one name for each example.')
    rule = Sets(
        method,
        float(coverage),
        thresholds=(),
        counts=(),
        examples=len(answer),
        by=by,
        randomised=randomised,
        longest=longest if isinstance(answer, SpanPrediction) else 0,
        seed=seed,
    )
    if groups is not None and by == "group":
        if len(groups) != len(answer):
            raise DataError(
                f"{len(groups)} groups for {len(answer)} held-out examples: give one name each."
            )
        rule = replace(rule, groups=tuple(sorted({str(name) for name in groups})))
        answer = replace(answer, group=np.asarray(rule.codes(groups)))
    if method in SHARE:
        order = np.random.default_rng(seed).permutation(len(answer))
        count = round(SHARE[method] * len(answer))
        rows, rest = np.sort(order[:count]), np.sort(order[count:])
        _check_count(len(rest), rule)
        part = answer[rows]
        if method == "raps":
            penalty, free = _penalty(part, labels[rows], coverage)
            rule = replace(rule, penalty=penalty, free=free)
        else:
            rule = replace(rule, scale=_scale(part, labels[rows]))
        answer, labels = answer[rest], labels[rest]
        rule = replace(rule, examples=len(rest), tuned=count)
    true = _true(rule, answer, labels)
    if np.isnan(true.score).any():
        raise DataError("The answers to the held-out examples hold NaN. Leave those examples out.")
    rule = _with_thresholds(rule, true, answer)
    if not np.isfinite(rule.thresholds).all():
        raise DataError(
            f"Coverage {coverage:.4g} is out of reach: the right span is not among the likeliest "
            f"of {1 - np.isfinite(true.score).mean():.1%} of the held-out examples. Ask for less."
        )
    sizes = rule.sizes(answer)
    return replace(rule, size=float(sizes.mean()), empty=float((sizes == 0).mean()))


def threshold(score: Array, example: Array, coverage: float) -> tuple[float, int]:
    """Return the smallest threshold that keeps the risk (see above), and the examples behind it.

    It is infinite if there are too few examples.
    """
    _, place, entries = np.unique(example, return_inverse=True, return_counts=True)
    count = len(entries)
    if count < least_examples(coverage):
        return float("inf"), count
    order = np.argsort(score)
    weight = (1 / entries[place])[order]
    missed = np.cumsum(weight[::-1])[::-1] - weight  # the sum of the losses at each score
    budget = (1 - coverage) * (count + 1) - 1
    return float(score[order][np.argmax(missed <= budget + 1e-9)]), count


def _with_thresholds(rule: Sets, true: TrueScores, answer: Prediction) -> Sets:
    """Return the rule with thresholds by group and column."""
    by_number = isinstance(answer, RegressionPrediction)
    columns = 1
    if by_number:
        columns = answer.values.shape[1]
    elif rule.by == "class":
        columns = answer.probabilities.shape[-1]
    codes = np.zeros(len(answer), dtype=int) if answer.group is None else answer.group
    of_group = codes[true.example]
    thresholds = np.empty((max(1, len(rule.groups)), columns))
    counts = np.zeros(thresholds.shape, dtype=int)
    for column in range(columns):
        of_column = true.column == column
        everything = of_column if by_number or rule.by != "class" else np.ones_like(of_column)
        pooled, examples = threshold(
            true.score[everything], true.example[everything], rule.coverage
        )
        _check_count(examples, rule)
        for group in range(len(thresholds)):
            chosen = of_column & (of_group == group)
            own, counts[group, column] = threshold(
                true.score[chosen], true.example[chosen], rule.coverage
            )
            enough = counts[group, column] >= rule.least
            thresholds[group, column] = own if enough else pooled
    return replace(
        rule,
        thresholds=tuple(map(tuple, thresholds.tolist())),
        counts=tuple(map(tuple, counts.tolist())),
    )


def _check_count(count: int, rule: Sets) -> None:
    if count >= rule.least:
        return
    used = f" ({rule.method} chooses its options on others)" if rule.method in SHARE else ""
    reach = f"at most {count / (count + 1):.3g}" if count else "nothing"
    raise DataError(
        f"Coverage {rule.coverage:.4g} needs at least {rule.least} held-out examples with labels, "
        f"but there are {count}{used}. Give more, or ask for {reach}."
    )


def _true(rule: Sets, answer: Prediction, labels: Array) -> TrueScores:
    """Return the scores of what is true."""
    rows = np.arange(len(answer))
    if isinstance(answer, SpanPrediction):
        found = np.full(len(rows), np.inf)
        for row, (start, end) in enumerate(labels.tolist()):
            for first, last, probability in likely_spans(answer, row, longest=rule.longest):
                if (first, last) == (start, end):
                    found[row] = 1 - probability
        return TrueScores(found, rows, np.zeros_like(rows))
    if isinstance(answer, RegressionPrediction):
        errors = np.abs(labels.reshape(answer.values.shape) - answer.values.astype(np.float64))
        example, column = np.indices(errors.shape)
        scores = errors / rule.sigma(answer)
        return TrueScores(scores.ravel(), example.ravel(), column.ravel())
    scores = rule.scores(answer)
    if isinstance(answer, MultiLabelPrediction):
        example, column = np.nonzero(labels > 0.5)
        found = scores[example, column]
    elif isinstance(answer, TokenPrediction):
        example, token = np.nonzero(answer.real & (labels != IGNORED))
        column = labels[example, token]
        found = scores[example, token, column]
    else:
        example, column = rows, labels
        found = scores[example, column]
    return TrueScores(found, example, column if rule.by == "class" else np.zeros_like(example))


def _penalty(answer: Prediction, labels: Array, coverage: float) -> tuple[float, int]:
    """Return the penalty and the number of free classes of `raps`: those with the smallest sets."""
    probabilities = as_numpy(answer.probabilities).astype(np.float64)
    rows = np.arange(len(labels))
    place = np.argsort(np.argsort(-probabilities, kind="stable"), kind="stable")
    ranks = np.sort(place[rows, labels] + 1)
    at = min(len(rows), int(np.ceil((len(rows) + 1) * coverage - 1e-9))) - 1
    free, sizes = int(ranks[at]), []
    for penalty in PENALTIES:
        scores = adaptive_scores(probabilities, penalty=penalty, free=free)
        limit = np.sort(scores[rows, labels])[at]
        sizes.append((scores <= limit).sum(-1).mean())
    return PENALTIES[int(np.argmin(sizes))], free


def _scale(answer: Prediction, labels: Array) -> tuple[tuple[float, float, float], ...]:
    """Fit sigma = base + spread x a + novelty score x b to absolute errors, none below 0."""
    from scipy.optimize import nnls

    values = as_numpy(answer.values).astype(np.float64)
    errors = np.abs(labels.reshape(values.shape) - values)
    spread = as_numpy(answer.spread).astype(np.float64)
    score = answer.novelty_score
    novelty = np.zeros(len(values)) if score is None else as_numpy(score).astype(np.float64)
    found = []
    for column in range(values.shape[1]):
        parts = np.stack([np.ones(len(values)), spread[:, column], novelty], 1)
        size = np.maximum(np.abs(parts).max(0), 1e-12)  # one scale for all, so that nnls is exact
        weights = nnls(parts / size, errors[:, column])[0] / size
        least = FLOOR * errors[:, column].mean() or 1.0
        found.append((max(float(weights[0]), float(least)), float(weights[1]), float(weights[2])))
    return tuple(found)
