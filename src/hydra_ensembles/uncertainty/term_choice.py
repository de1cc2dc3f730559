"""Choose the terms of novelty by classes that are left out of the known data.

Near outliers are like classes that were left out. So classes are left out in turn, in five folds:
statistics are fitted to the others, whose examples are held out in closed form, and the left-out
classes are the outliers; probabilities of the left-out classes are dropped. Without labels,
clusters are left out. Families of far outliers (proxies) can be given beside them.

A sum of -log p is built step by step. It starts with the trunk's distance to all known data, and
takes the term that raises the worst and the mean AUROC most, until that is below 0.05. Single
winners are fragile, sums are not. An input is then as new as the usual sum says or as the chosen
one says, whichever says more, on the usual one's scale (matched at the median and the 95 % quantile
of known data): left-out classes tell nothing about far outliers, which the usual sum finds. The
usual sum stays alone unless both together are better by 0.5 AUROC in the mean, on classes that took
no part in choosing, with a paired interval above 0, and lose no more than 0.3 on any family of far
outliers.

Candidates are the distances of the last blocks (to all data, to classes, relative), the nearest
neighbour, the nearest class by cosine, which is the distance to classes at full shrinkage, and two
scores of the probability. Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .distances import Measures, Term
from .moments import Moments, class_distance, global_distance
from .novelty import Ranks

FOLDS = 5
LEAST_CLASSES = 6
"""Fewest classes from which some are left out."""
LEAST_EXAMPLES, LEAST_PER_CLASS = 100, 5
"""Fewest examples to choose by, in all and per class."""
MOST_CLASSES = 1000
TRUNK_TAPS = 8
"""Taps of the trunk that stand for all of them while terms are chosen."""
MOST_TERMS = 6
GAIN, STEP_GAIN, FAR_LOSS = 0.5, 0.05, 0.3
"""In AUROC, percent: what a choice must gain, what a step must gain, what far families may lose."""
CLUSTERS = 10


@dataclass(frozen=True)
class Examples:
    """Unit features `[example, tap, width]`, mean probabilities and, if known, classes."""

    features: Tensor
    probability: Tensor | None
    classes: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """The terms of novelty.

    Attributes:
        usual: Weights of the usual terms.
        chosen: Weights of a second sum; None without one.
        note: Why, in a few words.
    """

    usual: dict[Term, float]
    chosen: dict[Term, float] | None = None
    note: str = "the usual terms"

    @property
    def terms(self) -> list[Term]:
        """All terms, each once."""
        return list({**self.usual, **(self.chosen or {})})

    @property
    def weights(self) -> Tensor:
        """Weights of all terms in each sum, `[sum, term]`."""
        sums = [self.usual] if self.chosen is None else [self.usual, self.chosen]
        rows = [[weights.get(term, 0.0) for term in self.terms] for weights in sums]
        return torch.tensor(rows, dtype=torch.float64)

    def taps(self, kind: str) -> list[int]:
        """Return the taps of one kind of terms."""
        return [tap for found, tap in self.terms if found == kind]


@dataclass(frozen=True)
class Fold:
    """-log p of all columns that sums are made of, with some classes left out.

    Attributes:
        known: Of held-out examples of the classes that stayed, `[example, column]`.
        near: Of the examples of the classes left out.
        groups: Their classes, `[example]`.
        far: Of each family of far outliers.
    """

    known: Tensor
    near: Tensor
    groups: Tensor
    far: list[Tensor]


def choose_terms(
    examples: Examples,
    usual: dict[Term, float],
    *,
    first_class_tap: int,
    classes: bool,
    far: Mapping[str, Examples],
) -> Choice:
    """Choose terms, or keep the usual ones.

    Args:
        examples: Known examples; none of them should give ranks afterwards.
        usual: The usual terms and their weights; the last tap is the end of the last block.
        first_class_tap: The first tap of the last blocks.
        classes: Whether distances to classes are measured.
        far: Families of far outliers.
    """
    count, taps, _ = examples.features.shape
    probability = examples.probability
    if count < LEAST_EXAMPLES or probability is None or probability.shape[1] > MOST_CLASSES:
        return Choice(usual)
    groups = examples.classes if classes else clusters(examples.features[:, -1].float())
    assert groups is not None
    present = groups.unique()
    if len(present) < LEAST_CLASSES or count < LEAST_PER_CLASS * len(present):
        return Choice(usual)
    trunk = range(0, taps - 1, -(-(taps - 1) // TRUNK_TAPS))
    heard = sorted({*trunk, *range(first_class_tap, taps)})
    late = heard.index(first_class_tap)
    folds = []
    for number in range(FOLDS):
        left_out = torch.isin(groups, present[number::FOLDS])
        found, terms = _fold(examples, groups, left_out, heard, late, classes, list(far.values()))
        folds.append(_with_trunk(found, [terms.index(("distance", tap)) for tap in trunk]))
    # columns: the trunk's mean distance, all terms, nothing
    base = [0] if classes else [0, 1 + terms.index(("gen", -1))]
    candidates = [1 + place for place, (_, tap) in enumerate(terms) if tap >= first_class_tap]
    if classes:  # clusters say nothing about probabilities
        candidates += [1 + terms.index(term) for term in (("gen", -1), ("entropy", -1))]
    weights = torch.zeros(len(terms) + 2, dtype=torch.float64)
    for term, weight in usual.items():
        in_trunk = term[0] == "distance" and term[1] < taps - 1
        weights[0 if in_trunk else 1 + terms.index(term)] += weight
    gains, losses, figures = [], [], []
    for fold in folds:  # judged on classes that took no part in choosing
        sums = weights.new_zeros(len(weights), 2)
        sums[:, 0] = weights
        sums[select([other for other in folds if other is not fold], base, candidates), 1] = 1.0
        scale, offset = matched(fold.known @ sums)
        known = _both((fold.known @ sums) * scale + offset)
        shares = 100 * shares_below(known, _both((fold.near @ sums) * scale + offset))
        figures.append(shares.mean(0))
        gain = shares[:, 1] - shares[:, 0]
        gains += [float(gain[fold.groups == group].mean()) for group in fold.groups.unique()]
        for family in fold.far:
            share = 100 * shares_below(known, _both((family @ sums) * scale + offset)).mean(0)
            losses.append(float(share[0] - share[1]))
    before, after = torch.stack(figures).mean(0).tolist()
    gain = torch.tensor(gains)
    low = float(gain.mean() - 1.96 * gain.std() / len(gain) ** 0.5)
    lost = torch.tensor(losses).view(FOLDS, -1).mean(0)
    figure = f"AUROC of left-out {'classes' if classes else 'clusters'}"
    if after - before < GAIN or low <= 0 or bool((lost > FAR_LOSS).any()):
        note = f"the usual terms ({figure} {before:.1f}, with the best other sum {after:.1f})"
        return Choice(usual, note=note)
    chosen = dict.fromkeys((("distance", tap) for tap in range(taps - 1)), 1 / (taps - 1))
    for column in select(folds, base, candidates)[1:]:
        chosen[terms[column - 1]] = chosen.get(terms[column - 1], 0.0) + 1.0
    note = f"the usual terms or chosen ones ({figure} {after:.1f}, without these {before:.1f})"
    return Choice(usual, chosen, note)


def matched(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors and offsets that bring known sums `[example, sum]` to the scale of the first.

    Their medians and 95 % quantiles are then equal.
    """
    levels = torch.tensor([0.5, 0.95], dtype=sums.dtype)
    middle, high = sums.quantile(levels, dim=0)
    spread = (high - middle).clamp_min(1e-12)
    scale = spread[0] / spread
    return scale, middle[0] - middle * scale


def _both(sums: Tensor) -> Tensor:
    """Return the usual sum, and the larger one of both, `[example, 2]`."""
    return torch.stack([sums[:, 0], sums.amax(1)], 1)


def select(folds: Sequence[Fold], base: Sequence[int], candidates: Sequence[int]) -> list[int]:
    """Return the columns whose sum has the best worst and mean AUROC, step by step from `base`."""
    chosen, best = list(base), _objective(folds, list(base), [-1])[0]
    rest = list(candidates)
    while rest and len(chosen) - len(base) < MOST_TERMS:
        values = _objective(folds, chosen, rest)
        place = int(torch.tensor(values).argmax())
        if values[place] - best < STEP_GAIN:
            break
        best = values[place]
        chosen.append(rest.pop(place))
    return chosen


def _objective(folds: Sequence[Fold], chosen: list[int], more: list[int]) -> list[float]:
    """Return the mean of worst and mean AUROC for `chosen` with each of `more`, in percent."""

    def sums(columns: Tensor) -> Tensor:
        return columns[:, chosen].sum(1, keepdim=True) + columns[:, more]

    families: list[Tensor] = []
    distant: list[list[Tensor]] = []
    for fold in folds:
        known = sums(fold.known)
        families.append(shares_below(known, sums(fold.near)).mean(0))
        distant.append([shares_below(known, sums(family)).mean(0) for family in fold.far])
    families += [torch.stack(family).mean(0) for family in zip(*distant, strict=True)]
    found = 100 * torch.stack(families)
    values: list[float] = ((found.mean(0) + found.amin(0)) / 2).tolist()
    return values


def shares_below(known: Tensor, new: Tensor) -> Tensor:
    """Return the share of known values below each new one, `[new, sum]`; their mean is the AUROC.

    Ties count one half.
    """
    rows, values = known.T.sort(-1).values.contiguous(), new.T.contiguous()
    below = torch.searchsorted(rows, values) + torch.searchsorted(rows, values, right=True)
    return below.T.double() / (2 * len(known))


def _fold(
    examples: Examples,
    groups: Tensor,
    left_out: Tensor,
    heard: list[int],
    late: int,
    classes: bool,
    far: Sequence[Examples],
) -> tuple[Fold, list[Term]]:
    """Return -log p of all terms with some classes left out, and the terms."""
    inside = (~left_out).nonzero().flatten()
    features = examples.features[:, heard]
    rows = features[inside]
    stayed, number = groups[inside].unique(return_inverse=True)
    _, taps, width = rows.shape
    moments = Moments.empty(taps, width, len(stayed) if classes else 0, first_class_tap=late)
    moments.add_(rows, number if classes else None)
    last = tuple(range(late, len(heard)))
    measures = Measures(
        global_distance(moments),
        class_distance(moments) if classes else None,
        late,
        rows[:, late:].transpose(0, 1),
        last,
        moments.class_totals.transpose(0, 1) if classes else None,
        last if classes else (),
    )

    def probability(found: Examples) -> Tensor:
        assert found.probability is not None  # `choose_terms` asks
        if not classes:
            return found.probability
        kept = torch.ones(found.probability.shape[1], dtype=torch.bool)
        kept[groups[left_out]] = False
        rest = found.probability[:, kept].double()
        return rest / rest.sum(1, keepdim=True).clamp_min(1e-30)

    known = measures(
        rows,
        probability(examples)[inside],
        rows=torch.arange(len(rows)),
        classes=number if classes else None,
    )
    ranks = Ranks.of(known)
    near = measures(features[left_out], probability(examples)[left_out])
    others = [measures(one.features[:, heard], probability(one)) for one in far]
    fold = Fold(
        ranks.held_out_surprise(known),
        ranks.surprise(near),
        groups[left_out],
        [ranks.surprise(other) for other in others],
    )
    return fold, [(kind, heard[tap] if tap >= 0 else tap) for kind, tap in measures.terms]


def _with_trunk(fold: Fold, trunk: list[int]) -> Fold:
    """Put the mean of the trunk's columns first, and zeros last."""

    def wider(columns: Tensor) -> Tensor:
        mean = columns[:, trunk].mean(1, keepdim=True)
        return torch.cat([mean, columns, torch.zeros_like(mean)], 1)

    return Fold(wider(fold.known), wider(fold.near), fold.groups, [wider(one) for one in fold.far])


def clusters(rows: Tensor, count: int = CLUSTERS) -> Tensor:
    """Return the clusters of rows by Lloyd's algorithm, from rows that lie evenly in the data."""
    centres = rows[:: max(1, len(rows) // count)][:count].clone()
    for _ in range(20):
        nearest = torch.cdist(rows, centres).argmin(1)
        for cluster in nearest.unique():
            centres[cluster] = rows[nearest == cluster].mean(0)
    return nearest
