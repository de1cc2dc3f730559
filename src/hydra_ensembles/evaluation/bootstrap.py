"""How sure we are of a figure: percentile intervals and paired differences over test examples.

Examples of each set are drawn with replacement (Efron, 1979). The draws depend only on the seed and
the set's name, so two models evaluated on the same data are resampled alike, which is what makes
their difference paired.

Figures that a finite sample biases (ECE above all) are biased once more in each draw, so their
intervals lean to the same side; paired differences hardly do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.running import progress_bar
from ..errors import DataError
from .figures import POST, Examples, all_figures, rank_columns
from .intervals import percentiles

if TYPE_CHECKING:
    from .results import Results


def resamples(examples: Examples, *, count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield `count` draws: for each set, the indices of as many examples, with replacement."""
    sizes = {name: len(next(iter(columns.values()))) for name, columns in examples.items()}
    generators = {
        name: torch.Generator().manual_seed(seed * 1_000_003 + _number(name)) for name in sizes
    }
    for _ in range(count):
        yield {
            name: torch.randint(size, (size,), generator=generators[name])
            for name, size in sizes.items()
        }


def _number(name: str) -> int:
    return zlib.crc32(name.removeprefix(POST).encode())  # scaled columns are the same examples


def resampled_figures(
    examples: Examples,
    *,
    scores: Sequence[str],
    count: int,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Return every figure on each draw, `[count]`; NaN where a draw leaves it undefined."""
    ranked = rank_columns(examples)
    rows = []
    draws = resamples(ranked, count=count, seed=seed)
    bar = progress_bar(
        draws, description="intervals (bootstrap)", enabled=progress, total=count, unit="draws"
    )
    for draw in bar:
        drawn = {
            name: {column: values[draw[name]] for column, values in columns.items()}
            for name, columns in ranked.items()
        }
        rows.append(all_figures(drawn, scores=scores))
    keys = {key: None for row in rows for key in row}
    nan = float("nan")
    return {
        key: torch.tensor([row.get(key, nan) for row in rows], dtype=torch.float64) for key in keys
    }


def intervals(
    draws: Mapping[str, Tensor], *, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Return the central percentile interval of every figure's draws."""
    return {key: percentiles(values, level=level) for key, values in draws.items()}


@dataclass(frozen=True)
class Difference:
    """One figure of two models on the same examples: `a - b`, its interval, its two-sided p."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Mapping[str, Difference]):
    """Paired differences of two results by figure; prints as a table."""

    a: str
    b: str
    differences: dict[str, Difference]
    resamples: int
    level: float = 0.95

    def __getitem__(self, key: str) -> Difference:
        return self.differences[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def to_markdown(self) -> str:
        """Return the differences as a Markdown table; figures as they are, not in percent."""
        lines = [
            f"| figure | {self.a} | {self.b} | difference | {self.level:.0%} interval | p |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for key, row in self.differences.items():
            lines.append(
                f"| {key} | {row.a:.4f} | {row.b:.4f} | {row.difference:+.4f} "
                f"| [{row.low:+.4f}, {row.high:+.4f}] | {row.p:.3f} |"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        head = f"{self.a} against {self.b}: paired bootstrap of {self.resamples} draws"
        return f"{head}\n{self.to_markdown()}"


def compare(
    a: Results | Sequence[Results],
    b: Results | Sequence[Results],
    *,
    count: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two results on the same data by a paired bootstrap over test examples.

    Args:
        a: results that hold their examples (fresh from `evaluate`, or loaded with them). Several
            results of one method (seeds, draws of calibration data) stand for their mean: every
            resample of the examples is taken alike in all of them.
        b: the same, of another model on the same data and with the same scores.
        count: number of draws; the smallest p is 2 / (count + 1).
        level: of the interval.
        seed: of the draws.

    Returns:
        For every figure that both have, a - b with its percentile interval and the two-sided p:
        twice the smaller share of draws on one side of zero.
    """
    sides = [_as_list(a), _as_list(b)]
    everyone = [result for side in sides for result in side]
    first = everyone[0]
    for other in everyone[1:]:
        check_same_data(first, other)
        if other.scores[0] != first.scores[0]:
            raise DataError(
                f"{first.name!r} was evaluated by {first.scores[0]!r} and {other.name!r} by "
                f"{other.scores[0]!r}: evaluate both with the same main score."
            )
    sets = tuple(s for s in first.examples if all(s in result.examples for result in everyone))
    scores = tuple(s for s in first.scores if all(s in result.scores for result in everyone))
    draws = [_mean_draws(side, sets, scores, count, seed) for side in sides]
    moves = {key: draws[0][key] - draws[1][key] for key in draws[0] if key in draws[1]}
    differences = {}
    for key, (low, high) in intervals(moves, level=level).items():
        if not all(key in result for result in everyone):
            continue
        left, right = (sum(result[key] for result in side) / len(side) for side in sides)
        moved = moves[key][~moves[key].isnan()]
        side = min(int((moved <= 0).sum()), int((moved >= 0).sum()))
        p = min(1.0, 2 * (side + 1) / (len(moved) + 1))
        differences[key] = Difference(left, right, left - right, low, high, p)
    return Comparison(sides[0][0].name, sides[1][0].name, differences, count, level)


def _as_list(results: Results | Sequence[Results]) -> list[Results]:
    from .results import Results

    found = [results] if isinstance(results, Results) else list(results)
    if not found:
        raise DataError("There are no results to compare: one side is an empty list.")
    return found


def _mean_draws(
    side: Sequence[Results], sets: tuple[str, ...], scores: tuple[str, ...], count: int, seed: int
) -> dict[str, Tensor]:
    """Return every figure on each draw, the mean over several results, `[count]`."""
    found = []
    for result in side:
        known = result._resampled  # many rows are compared with one reference
        key = (sets, scores, count, seed)
        if key not in known:
            examples = {name: result.examples[name] for name in sets}
            known[key] = resampled_figures(examples, scores=scores, count=count, seed=seed)
        found.append(known[key])
    shared = [key for key in found[0] if all(key in draws for draws in found)]
    return {key: torch.stack([draws[key] for draws in found]).mean(0) for key in shared}


def check_same_data(a: Results, b: Results) -> None:
    """Raise unless both results hold columns of the same examples."""
    for result in (a, b):
        if not result.examples:
            raise DataError(
                f"The results of {result.name!r} hold no examples to resample. Evaluate again, or "
                "load results that were saved with their examples."
            )
    for name in set(a.examples) & set(b.examples):
        left, right = a.examples[name], b.examples[name]
        sizes = [len(next(iter(columns.values()))) for columns in (left, right)]
        if sizes[0] != sizes[1]:
            raise DataError(
                f"{a.name!r} saw {sizes[0]} examples of {name!r} and {b.name!r} saw {sizes[1]}: a "
                "paired comparison needs the same data, in the same order."
            )
        if "label" in left and not torch.equal(left["label"], right["label"]):
            raise DataError(
                f"{a.name!r} and {b.name!r} saw other labels in {name!r}: a paired comparison "
                "needs the same data, in the same order. Is the loader shuffled?"
            )
