"""How sure we are of a figure: intervals and paired differences over test examples, and verdicts.

Examples of each set are drawn with replacement (Efron, 1979). The draws depend only on the seed and
the set's name, so two models evaluated on the same data are resampled alike, which is what makes
their difference paired.

Calibration errors are biased upwards by a finite sample, and once more in each draw: the
percentiles of their draws lie too high, sometimes above the figure itself. Their intervals are
corrected for it, see `span`.

95 % intervals: percentiles of bootstrap draws, and Student's t where draws are few.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .._tables import markdown_table
from ..data.progress import progress_bar
from ..errors import DataError
from .figures import AllFigures, Measured, direction

RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def percentiles(draws: Tensor, *, level: float = 0.95) -> tuple[float, float]:
    """Return the central interval of a figure's draws; NaN draws do not count."""
    tail = (1 - level) / 2
    low, high = draws.double().nanquantile(torch.tensor([tail, 1 - tail]).double()).tolist()
    return low, high


def bootstrap(
    values: Sequence[float], statistic: Callable[[Tensor], Tensor], *, seed: int = 0
) -> Interval:
    """Resample values with replacement (Efron, 1979).

    Args:
        values: The sample.
        statistic: `[draw, value]` to `[draw]`, such as a median over the last dimension.
        seed: Of the draws.
    """
    sample = torch.tensor(list(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(sample), (RESAMPLES, len(sample)), generator=generator)
    return Interval(float(statistic(sample[None])), *percentiles(statistic(sample[picked])))


def two_way_bootstrap(hits: Tensor, *, seed: int = 0) -> Interval:
    """Resample draws and examples together: the mean of `hits` `[draw, example]`."""
    generator = torch.Generator().manual_seed(seed)

    def shares(size: int) -> Tensor:
        picked = torch.randint(size, (RESAMPLES, size), generator=generator)
        counts = torch.zeros(RESAMPLES, size, dtype=torch.float64)
        return counts.scatter_add_(1, picked, torch.ones_like(counts)) / size

    draws, examples = hits.shape
    means = ((shares(draws) @ hits) * shares(examples)).sum(1)
    return Interval(float(hits.mean()), *percentiles(means))


def student(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval; a single value has no width."""
    from scipy.special import stdtrit

    sample = torch.tensor(list(values), dtype=torch.float64)
    mean, freedom = float(sample.mean()), len(sample) - 1
    if freedom < 1:
        return Interval(mean, mean, mean)
    half = float(stdtrit(freedom, 0.975)) * float(sample.std()) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


DRAWS, FEWEST = 1000, 200
WORK = 10**8
"""Examples times scores times draws that the default number of draws may cost."""
AT_ONCE = 2**18
"""Examples times draws that are held at a time: they fit into a processor's cache."""
BETTER, WORSE, SAME, INCONCLUSIVE = "better", "worse", "the same", "inconclusive"


def default_draws(sizes: Mapping[str, int], scores: Sequence[str]) -> int:
    """Return 1,000 draws, or fewer (200 at least) where so many would take minutes."""
    rows = sum(sizes.values()) * len(scores)
    return max(FEWEST, min(DRAWS, WORK // max(rows, 1)))


def resamples(sizes: Mapping[str, int], *, count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield `count` draws in parts: how often each example is drawn, `[draw, example]` by set."""
    generators = {
        name: torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        for name in sizes
    }
    at_once = max(1, AT_ONCE // max(sizes.values()))
    for start in range(0, count, at_once):
        draws = min(at_once, count - start)
        yield {name: _counts(size, draws, generators[name]) for name, size in sizes.items()}


def _counts(size: int, draws: int, generator: torch.Generator) -> Tensor:
    picked = torch.randint(size, (draws, size), generator=generator)
    picked += size * torch.arange(draws)[:, None]
    return torch.bincount(picked.flatten(), minlength=draws * size).view(draws, size).double()


def resampled_figures(
    figures: AllFigures, *, count: int, seed: int = 0, progress: bool = False
) -> dict[str, Tensor]:
    """Return every figure on each draw, `[count]`; NaN where a draw leaves it undefined."""
    parts: list[dict[str, Tensor]] = []
    bar = progress_bar(
        resamples(figures.sizes, count=count, seed=seed),
        description="intervals (bootstrap)",
        enabled=progress,
        total=-(-count // max(1, AT_ONCE // max(figures.sizes.values()))),
        unit="parts",
    )
    for counts in bar:
        parts.append(figures.of(counts))
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def span(key: str, value: float, draws: Tensor, *, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of a figure, or of a difference of two, which always holds its value.

    The percentiles of the draws. For calibration errors the hull of two intervals that correct the
    draws' bias: the percentiles around the value in place of the draws' mean, and the pivotal
    interval around the value less its own bias. Where a bin's gap is all noise, drawing again
    doubles its variance, so draws are sqrt(2) times the value and the bias of the value is
    1 / (sqrt(2) - 1) times that of the draws; where there is a real gap both are small.
    """
    low, high = percentiles(draws, level=level)
    if key.rsplit("/", 1)[-1] in ("ECE", "aECE"):
        mean = float(draws.nanmean())
        below, above = mean - low, high - mean
        unbiased = value - (mean - value) / (math.sqrt(2) - 1)
        low, high = min(value - below, unbiased - above), max(value + above, unbiased + below)
    # between infinite draws (a loss without bound) there is no percentile
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return min(low, value), max(high, value)


def intervals(
    figures: Mapping[str, float], draws: Mapping[str, Tensor], *, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Return the interval of every figure that can be resampled; no ECE is below 0."""
    found = {}
    for key, value in figures.items():
        if key in draws and not bool(draws[key].isnan().all()):
            low, high = span(key, value, draws[key], level=level)
            found[key] = (max(low, 0.0) if key.endswith("ECE") else low, high)
    return found


@dataclass(frozen=True)
class Difference:
    """One figure of two models on the same examples: `a - b`, its interval, its two-sided p.

    `verdict` is what the interval shows: `a` is `better` or `worse`, `the same` (on every draw),
    or the comparison is `inconclusive`; empty for figures of which neither more nor less is better.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    verdict: str = ""


def verdict_of(key: str, low: float, high: float) -> str:
    """Return what an interval of the difference of two models shows about the first."""
    sign = direction(key)
    if not sign:
        return ""
    if low == high == 0:
        return SAME
    if low > 0 or high < 0:
        return BETTER if sign * low > 0 else WORSE
    return INCONCLUSIVE


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

    def in_words(self, names: Mapping[str, str], on: str) -> str:
        """Say where `a` is better and worse: `NLL better; ECE inconclusive on 195 texts`.

        Args:
            names: What to call the figures to speak of, by key; those that are missing are not.
            on: How much data there was.
        """
        words = []
        for verdict in (BETTER, WORSE, SAME, INCONCLUSIVE):
            told = [n for k, n in names.items() if k in self and self[k].verdict == verdict]
            if told:
                listed = " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))
                words.append(f"{listed} {verdict}" + f" on {on}" * (verdict == INCONCLUSIVE))
        return "; ".join(words)

    def to_markdown(self) -> str:
        """Return the differences as a Markdown table; figures as they are, not in percent."""
        span = f"{self.level:.0%} interval"
        head = ["figure", self.a, self.b, "difference", span, "p", f"{self.a} is"]
        rows = [head]
        for key, row in self.differences.items():
            values = (f"{row.a:.4f}", f"{row.b:.4f}", f"{row.difference:+.4f}")
            interval = f"[{row.low:+.4f}, {row.high:+.4f}]"
            rows.append([key, *values, interval, f"{row.p:.3f}", row.verdict])
        return markdown_table(rows)

    def __repr__(self) -> str:
        head = f"{self.a} against {self.b}: paired bootstrap of {self.resamples} draws"
        return f"{head}\n{self.to_markdown()}"


def compare(
    a: Measured | Sequence[Measured],
    b: Measured | Sequence[Measured],
    *,
    count: int | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two results on the same data by a paired bootstrap over test examples.

    Example:
        >>> compare(evaluate(ensemble, test), evaluate(model, test))["cls/NLL"].verdict
        'better'

    Args:
        a: results that hold their examples (fresh from `evaluate`, or loaded with them). Several
            results of one method (seeds, draws of calibration data) stand for their mean: every
            resample of the examples is taken alike in all of them.
        b: the same, of another model on the same data and with the same scores.
        count: number of draws; the smallest p is 2 / (count + 1). By default 1,000, or fewer (200
            at least) where the data is large.
        level: of the interval.
        seed: of the draws.

    Returns:
        For every figure that both have, a - b with its interval, the two-sided p (twice the smaller
        share of draws on one side of zero) and the verdict of the interval.
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
    if count is None:
        sizes = {name: len(first.examples[name][f"score:{first.scores[0]}"]) for name in sets}
        count = default_draws(sizes, max((result.scores for result in everyone), key=len))
    draws = []
    for side in sides:  # the mean over several results
        parts = [draws_of(result, sets, count, seed) for result in side]
        shared = [key for key in parts[0] if all(key in part for part in parts)]
        draws.append({key: torch.stack([part[key] for part in parts]).mean(0) for key in shared})
    differences = {}
    all_sets = all(set(result.examples) == set(sets) for result in everyone)
    for key in draws[0]:
        if "mean/" in key and not all_sets:
            continue  # means over other sets are other figures
        if not all(key in result for result in everyone) or key not in draws[1]:
            continue
        left, right = (sum(result[key] for result in side) / len(side) for side in sides)
        moves = draws[0][key] - draws[1][key]
        moves = moves[~moves.isnan()]
        if not len(moves):
            continue
        low, high = span(key, left - right, moves, level=level)
        smaller = min(int((moves <= 0).sum()), int((moves >= 0).sum()))
        p = min(1.0, 2 * (smaller + 1) / (len(moves) + 1))
        verdict = verdict_of(key, low, high)
        differences[key] = Difference(left, right, left - right, low, high, p, verdict)
    return Comparison(sides[0][0].name, sides[1][0].name, differences, count, level)


def _as_list(results: Measured | Sequence[Measured]) -> list[Measured]:
    # results are mappings, a list of them is not
    several = [results] if isinstance(results, Mapping) else results
    if not isinstance(several, Sequence) or not all(isinstance(r, Mapping) for r in several):
        raise DataError(
            f"Expected results of evaluate(), or a list of them; found {results!r:.60}."
        )
    found = list(cast("Sequence[Measured]", several))
    if not found:
        raise DataError("There are no results to compare: one side is an empty list.")
    return found


def winners(results: Sequence[Measured]) -> dict[str, int]:
    """Return by figure the place of the result that is better than every other.

    Better is what the paired interval says. A figure without a winner is left out: so are all where
    results hold no examples, saw other data or were evaluated with `bootstrap=0`.
    """
    first = results[0].settings
    count, seed = first.get("bootstrap"), first.get("seed", 0)
    if len(results) < 2 or not all(result.settings.get("bootstrap") for result in results):
        return {}
    beaten: Counter[tuple[str, int]] = Counter()
    for one, other in combinations(range(len(results)), 2):
        try:
            found = compare(results[one], results[other], count=count, seed=seed)
        except DataError:
            return {}
        for key, row in found.items():
            if row.verdict in (BETTER, WORSE):
                beaten[key, one if row.verdict == BETTER else other] += 1
    rivals = Counter(key for result in results for key in result)
    return {key: one for (key, one), number in beaten.items() if number == rivals[key] - 1}


def draws_of(
    result: Measured, sets: tuple[str, ...], count: int, seed: int, *, progress: bool = False
) -> dict[str, Tensor]:
    """Return every figure of a result on each draw of some of its sets; kept by the result."""
    key = (sets, count, seed)  # many rows are compared with one reference
    if key not in result.draws:
        examples = {name: result.examples[name] for name in sets}
        figures = AllFigures(examples, scores=result.scores)
        result.draws[key] = resampled_figures(figures, count=count, seed=seed, progress=progress)
    return result.draws[key]


def check_same_data(a: Measured, b: Measured) -> None:
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
