"""Sets with a guarantee: the classes, labels, numbers or spans that may be the right ones.

`uncertainty.set_fit` chooses the thresholds on held-out examples; here is what they make of an
answer. Nothing of this needs torch: a saved ensemble, the service and an exported program have the
same sets. Every score is low where a class (label, number, span) fits; what scores at most the
threshold is in the set.

- `lac`, 1 - p_y: the smallest sets on average, which may be empty (Sadinle, Lei & Wasserman, 2019).
- `aps`, the sum of the probabilities of the classes at least as probable as y; `randomised` takes
  U p_y away, with U in [0, 1] (Romano, Sesia & Candès, 2020).
- `raps`, `aps` plus penalty x max(0, rank - free) (Angelopoulos, Bates, Jordan & Malik, 2021).
- `plain`, |y - f|, and `normalised`, |y - f| / sigma(x), where sigma grows with the members' spread
  and with novelty and is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .errors import DataError, FormatError
from .prediction import Prediction, as_numpy, named
from .task_predictions import (
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)

Array = np.ndarray[Any, Any]

METHODS = ("lac", "aps", "raps", "normalised", "plain")
RANDOMISED = ("aps", "raps")
BY = ("all", "class", "group")
MOST_SPANS = 20
"""Most spans in a set."""
IGNORED = -100
"""The label of a token that does not count."""


@dataclass(frozen=True)
class Sets:
    """A rule that turns answers into sets with a guarantee; made by `fit_sets`.

    Attributes:
        method: `lac`, `aps`, `raps`, `normalised` or `plain`.
        coverage: What is guaranteed, on average over data like the held-out examples.
        thresholds: By group and by column: classes where `by` is `"class"`, numbers of a regression
            with several, one column elsewhere.
        counts: Held-out examples behind each threshold; where they are too few for the coverage,
            the threshold is that of all examples together.
        examples: Held-out examples that the thresholds come from.
        by: `"all"`, `"class"` or `"group"`: what has a threshold of its own.
        groups: Names of the groups, in the order of the thresholds.
        randomised: Whether `aps` and `raps` take U p_y away.
        penalty, free: Of `raps`: what each class beyond the `free` most probable ones adds.
        scale: Of `normalised`, for each number: sigma = base + spread x a + novelty score x b.
        longest: Of question answering: most tokens of an answer.
        size: Mean size of the sets of the held-out examples: classes, labels, spans, or the width.
        empty: Share of the held-out examples (or tokens) whose set is empty.
        tuned: Further held-out examples, on which `penalty` and `free`, or `scale`, were chosen.
        seed: Of that choice, and of U.
    """

    method: str
    coverage: float
    thresholds: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    examples: int
    by: str = "all"
    groups: tuple[str, ...] = ()
    randomised: bool = False
    penalty: float = 0.0
    free: int = 0
    scale: tuple[tuple[float, float, float], ...] = ()
    longest: int = 0
    size: float = 0.0
    empty: float = 0.0
    tuned: int = 0
    seed: int = 0

    @property
    def least(self) -> int:
        """How many examples a threshold needs for this coverage."""
        return least_examples(self.coverage)

    @property
    def pooled(self) -> list[int]:
        """Numbers of the classes or groups with too few examples for a threshold of their own."""
        table = np.asarray(self.counts)
        counts = table.min(1) if self.by == "group" else table[0]
        return [] if self.by == "all" else np.flatnonzero(counts < self.least).tolist()

    @property
    def reads_novelty(self) -> bool:
        """Whether the sets depend on the novelty score."""
        return any(novelty > 0 for _, _, novelty in self.scale)

    def codes(self, names: Sequence[Any]) -> list[int]:
        """Return the numbers of groups; -1 for a group that had no held-out example."""
        places = {name: place for place, name in enumerate(self.groups)}
        return [places.get(str(name), -1) for name in names]

    def of(self, answer: Prediction) -> list[Any]:
        """Return each input's set as plain values, as rows hold it.

        Names of classes, the most probable first (for every token a list of them); `[low, high]`
        of a number, or a list of them; dictionaries of spans.
        """
        answer = answer.to_numpy()
        if isinstance(answer, SpanPrediction):
            return [self._spans(answer, row) for row in range(len(answer))]
        if isinstance(answer, RegressionPrediction):
            pairs = [
                [[float(f"{end:.7g}") for end in pair] for pair in row]
                for row in self.intervals(answer).tolist()
            ]
            return [row[0] if len(row) == 1 else row for row in pairs]
        order = np.argsort(-answer.probabilities, axis=-1, kind="stable")
        inside = np.take_along_axis(self.mask(answer), order, -1)
        shape = inside.shape[:-1]
        found = np.empty(shape, dtype=object)
        for place in np.ndindex(shape):
            found[place] = order[place][inside[place]].tolist()
        return named(found.tolist(), answer.class_names)

    def mask(self, answer: Prediction) -> Array:
        """Return which classes or labels are in the sets, bool `[batch, class]`."""
        answer = answer.to_numpy()
        scores = self.scores(answer)
        thresholds = self._thresholds(answer)
        return scores <= thresholds.reshape(len(thresholds), *[1] * (scores.ndim - 2), -1)

    def scores(self, answer: Prediction) -> Array:
        """Return how badly each class or label fits, `[batch, class]`."""
        probabilities = as_numpy(answer.probabilities).astype(np.float64)
        if self.method == "lac":
            return 1 - probabilities
        uniform = uniform_of(probabilities, self.seed) if self.randomised else None
        return adaptive_scores(probabilities, uniform, penalty=self.penalty, free=self.free)

    def intervals(self, answer: Prediction) -> Array:
        """Return the lowest and highest value of each number, `[batch, number, 2]`."""
        answer = answer.to_numpy()
        values = np.asarray(answer.values, dtype=np.float64)
        width = self._thresholds(answer) * self.sigma(answer)
        return np.stack([values - width, values + width], -1)

    def sigma(self, answer: Prediction) -> Array:
        """Return what errors are divided by, `[batch, number]`; 1 unless `normalised`."""
        if not self.scale:
            return np.ones(answer.values.shape)
        base, by_spread, by_novelty = np.asarray(self.scale).T
        sigma = base + by_spread * as_numpy(answer.spread).astype(np.float64)
        if not self.reads_novelty:
            return np.asarray(sigma)
        if answer.novelty_score is None:
            raise DataError(
                "The intervals grow with novelty, but the answer has none. Call "
                "fit_novelty_(known) and fit_sets() again."
            )
        return np.asarray(sigma + by_novelty * as_numpy(answer.novelty_score)[:, None])

    def covered(self, answer: Prediction, labels: Any) -> Array:
        """Return what share of what is true is in each set, `[batch]`; 1 where nothing is.

        For tokens whether the label is, `[token]`, of all real tokens with a label.

        Args:
            answer: The answers.
            labels: As `Task.check_labels` returns them.
        """
        answer, labels = answer.to_numpy(), as_numpy(labels)
        if isinstance(answer, SpanPrediction):
            found = [{(span["start"], span["end"]) for span in spans} for spans in self.of(answer)]
            pairs = zip(labels.tolist(), found, strict=True)
            return np.asarray([float(tuple(pair) in spans) for pair, spans in pairs])
        if isinstance(answer, RegressionPrediction):
            low, high = np.moveaxis(self.intervals(answer), -1, 0)
            numbers = labels.reshape(low.shape)
            return np.asarray(((low <= numbers) & (numbers <= high)).mean(1))
        mask = self.mask(answer)
        if isinstance(answer, MultiLabelPrediction):
            true = labels > 0.5
            missed = (true & ~mask).sum(1)
            return np.asarray(1 - missed / np.maximum(true.sum(1), 1))
        if isinstance(answer, TokenPrediction):
            counted = answer.real & (labels != IGNORED)
            mask, labels = mask[counted], labels[counted]
        return mask[np.arange(len(mask)), labels].astype(float)

    def sizes(self, answer: Prediction) -> Array:
        """Return how large the sets are, `[batch]`: classes, labels, spans, or the mean width.

        For tokens `[token]`, of all real tokens of the batch.
        """
        answer = answer.to_numpy()
        if isinstance(answer, SpanPrediction):
            return np.asarray([len(found) for found in self.of(answer)])
        if isinstance(answer, RegressionPrediction):
            return np.diff(self.intervals(answer)).mean((1, 2))
        sizes = self.mask(answer).sum(-1)
        return sizes[answer.real] if isinstance(answer, TokenPrediction) else sizes

    def _spans(self, answer: Prediction, row: int) -> list[dict[str, Any]]:
        threshold = float(self._thresholds(answer)[row if answer.group is not None else 0, 0])
        found = []
        for start, end, probability in likely_spans(answer, row, longest=self.longest):
            if 1 - probability > threshold:
                break
            text = None
            if answer.texts is not None and answer.offsets is not None:
                places = answer.offsets[row]
                none = (start, end) == (0, 0)
                text = "" if none else answer.texts[row][places[start][0] : places[end][1]]
            confidence = float(f"{probability:.7g}")
            found.append({"answer": text, "start": start, "end": end, "confidence": confidence})
        return found

    def _thresholds(self, answer: Prediction) -> Array:
        """Return thresholds `[batch or 1, column]`; of an unknown group the most careful one."""
        table = np.asarray(self.thresholds)
        careful = table.max(0, keepdims=True)
        if answer.group is None or self.by != "group":
            return careful
        codes = as_numpy(answer.group)
        return np.where(codes[:, None] < 0, careful, table[codes])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return {name: _lists(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sets:
        """Read what `to_dict` returned."""
        try:
            sets = cls(**{name: _tuples(value) for name, value in data.items()})
            good = _is_good(sets)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"Not valid sets: {error!r}.") from error
        if not good:
            raise FormatError(f"Not valid sets: {dict(data)!r:.300}.")
        return sets

    def guarantee(self) -> str:
        """Return what is guaranteed, in words."""
        each = {"class": "of each class, ", "group": "of each group, "}.get(self.by, "")
        return f"{each}{self.coverage:.4g} of data like these examples is covered, on average"

    def __str__(self) -> str:
        name = f"{self.method}, randomised" if self.randomised else self.method
        tuned = f" and {self.tuned} for its options" if self.tuned else ""
        lines = [f"{name} at coverage {self.coverage:.4g} ({self.examples} examples{tuned})"]
        size = "width" if self.method in ("normalised", "plain") else "size"
        empty = f", {self.empty:.1%} empty" if self.empty else ""
        lines.append(f"  mean {size} {self.size:.4g}{empty}; {self.guarantee()}")
        if self.method == "raps":
            lines.append(f"  penalty {self.penalty:g} for each class after the first {self.free}")
        for base, spread, novelty in self.scale:
            parts = f"{base:.3g} + {spread:.3g} spread + {novelty:.3g} novelty score"
            lines.append(f"  sigma = {parts}")
        if self.pooled:
            all_of = len(self.groups) if self.by == "group" else len(self.thresholds[0])
            kind = "groups" if self.by == "group" else "classes"
            lines.append(
                f"  {len(self.pooled)} of {all_of} {kind} have fewer than {self.least} examples "
                "and share the threshold of all: no guarantee for each of them"
            )
        lines.append("  no guarantee for inputs that are new")
        return "\n".join(lines)


def least_examples(coverage: float) -> int:
    """Return the least number of examples n with ceil((n + 1) coverage) <= n."""
    return max(1, math.ceil(coverage / (1 - coverage) - 1e-9))


def adaptive_scores(
    probabilities: Array, uniform: Array | None = None, *, penalty: float = 0.0, free: int = 0
) -> Array:
    """Return the scores of `aps` and `raps`, in the shape of the probabilities.

    Args:
        probabilities: `[..., class]`.
        uniform: U in [0, 1], `[...]`; None takes nothing away.
        penalty: What each class beyond the `free` most probable ones adds.
        free: Classes without a penalty.
    """
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    sums = np.cumsum(np.take_along_axis(probabilities, order, -1), -1)
    sums += penalty * np.maximum(0, np.arange(1, sums.shape[-1] + 1) - free)
    scores = np.empty_like(sums)
    np.put_along_axis(scores, order, sums, -1)
    return scores if uniform is None else scores - uniform[..., None] * probabilities


def uniform_of(probabilities: Array, seed: int) -> Array:
    """Return one number in [0, 1) for each input, from its own probabilities: the same everywhere.

    It is the fraction of ten times the margin log p_1 - log p_2, shifted by the seed: rounding
    hardly moves it, so that a batch, its examples and an exported program agree. A score with a
    fixed number is a function of the example as any other is, so coverage is as guaranteed.
    """
    logs = np.log(np.maximum(-np.partition(-probabilities, 1, axis=-1)[..., :2], 1e-30))
    shift = seed * (math.sqrt(5) - 1) / 2
    return np.asarray(np.mod(10 * (logs[..., 0] - logs[..., 1]) + shift, 1.0))


def likely_spans(answer: Prediction, row: int, *, longest: int) -> list[tuple[int, int, float]]:
    """Return start, end and probability of an input's `MOST_SPANS` likeliest spans, best first."""
    outputs = as_numpy(answer.answering_outputs[row]).astype(np.float64)  # [member, 2, token]
    able = as_numpy(answer.able[row])
    tokens = len(able)
    ahead = np.arange(tokens)[None] - np.arange(tokens)[:, None]
    valid = able[:, None] & able[None] & (ahead >= 0) & (ahead < longest)
    valid[0, 0] = True  # no answer
    starts, ends = np.nonzero(valid)
    logits = outputs[:, 0, starts] + outputs[:, 1, ends]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = (weights / weights.sum(-1, keepdims=True)).mean(0)
    best = np.argsort(-probabilities, kind="stable")[:MOST_SPANS]
    return [(int(starts[i]), int(ends[i]), float(probabilities[i])) for i in best]


def _is_good(sets: Sets) -> bool:
    """Tell whether the values of a rule can be."""
    table, counts = sets.thresholds, sets.counts
    numbers = [*sum(table, ()), *sum(sets.scale, ()), sets.penalty, sets.size, sets.empty]
    whole = [*sum(counts, ()), *(getattr(sets, name) for name in _WHOLE)]
    return (
        sets.method in METHODS
        and sets.by in BY
        and type(sets.coverage) is float
        and 0 < sets.coverage < 1
        and type(sets.randomised) is bool
        and all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
        and all(type(n) is int and n >= 0 for n in whole)
        and all(len(line) == 3 and line[0] > 0 and min(line) >= 0 for line in sets.scale)
        and len({len(row) for row in (*table, *counts)}) == 1
        and len(table) == len(counts) == (len(sets.groups) if sets.by == "group" else 1)
        and all(isinstance(name, str) for name in sets.groups)
    )


_WHOLE = ("examples", "free", "longest", "tuned", "seed")


def _lists(value: Any) -> Any:
    return [_lists(one) for one in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
