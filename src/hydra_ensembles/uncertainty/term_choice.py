"""Choose the terms of novelty by classes that are left out of the known data.

Near outliers are like classes that were left out. So classes are left out in turn, in five folds:
statistics are fitted to the others, whose examples are held out in closed form, and the left-out
classes are the outliers; probabilities of the left-out classes are dropped. Without labels,
clusters are left out.

Terms join the usual sum step by step, each with an eighth of the weight of all before it, so that
the usual sum's share may become small; a term may join again. The one joins that raises the mean
AUROC of left-out classes most, until that is below 0.05. Left-out classes tell nothing about far
outliers, which the usual sum finds. So far outliers (proxies, or given ones) have a veto: a term
does not join if the sum then loses 0.2 AUROC on any family of them, and 0.02 more for each point
that the usual sum is short of 100 there. The usual sum stays unless the longer sum is better by 0.5
AUROC in the mean, on classes that took no part in choosing, with a paired interval above 0, and
loses no more than twice the above on any family of far outliers.

A host that was trained on the classes finds left-out classes anyway, and they say little about what
it never saw. There nothing is chosen; the distance to classes after the last block, which was
trained to tell them apart, weighs more, by how far left-out classes are short of an AUROC of 100.

Candidates are the distances of the last blocks (to all data, to classes, relative), the nearest
neighbour, the nearest class by cosine, which is the distance to classes at full shrinkage, and two
scores of the probability. Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
MOST_TERMS = 24
SHARE = 8
GROWTH = 1 + 1 / SHARE
"""A term that joins has the weight of the sum so far, divided by `SHARE`: the sum grows by it."""
FOUND = 85.0
"""AUROC of left-out classes from which on the host has learned to tell them apart: they say little
about what it never saw then."""
LEARNED = 20
"""Then the last block's distance to classes adds this part of the usual sum's weight for each point
that left-out classes are short of 100: 1 / 20."""
GAIN, STEP_GAIN = 0.5, 0.05
"""In AUROC, percent: what a choice must gain, and what a step must gain."""
FAR_LOSS, SHORT_LOSS = 0.2, 0.02
"""In AUROC, percent: what a sum may lose on a family of far outliers, and what more for each point
that the usual sum is short of 100. On folds that did not choose the sum, it may be twice that."""
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
        weights: Of all terms.
        joined: The terms that joined the usual ones, in their order, and their shares of the sum.
        note: Why, in a few words.
    """

    weights: dict[Term, float]
    joined: dict[Term, float] = field(default_factory=dict)
    note: str = "the usual terms"

    def taps(self, kind: str) -> list[int]:
        """Return the taps of one kind of terms."""
        return [tap for found, tap in self.weights if found == kind]


@dataclass(frozen=True)
class Fold:
    """-log p of all columns that sums are made of, with some classes left out.

    Attributes:
        known: Of held-out examples of the classes that stayed, `[example, column]`.
        near: Of the examples of the classes left out.
        groups: Their classes, `[example]`.
        columns: Returns the columns of other examples.
        far: Of each family of far outliers.
    """

    known: Tensor
    near: Tensor
    groups: Tensor
    columns: Callable[[Examples], Tensor]
    far: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Verdict:
    """AUROC of left-out classes that took no part in choosing, in percent.

    Attributes:
        before, after: By the usual sum, and by the longer one.
        low: Lower end of the paired 95 % interval of their difference over classes.
        lost: By family of far outliers, what the longer sum loses.
        allowed: What it may lose where it was chosen.
    """

    before: float
    after: float
    low: float
    lost: Tensor
    allowed: Tensor

    @property
    def gains(self) -> bool:
        """Whether the longer sum is better where that is wanted."""
        return self.before < FOUND and self.after - self.before >= GAIN

    @property
    def clear(self) -> bool:
        """Whether the longer sum is clearly better."""
        return self.gains and self.low > 0 and bool((self.lost <= 2 * self.allowed).all())


def choose_terms(
    examples: Examples,
    usual: dict[Term, float],
    *,
    first_class_tap: int,
    classes: bool,
    far: Callable[[], Mapping[str, Examples] | None],
    without: Collection[str] = (),
) -> Choice:
    """Choose terms, or keep the usual ones.

    Args:
        examples: Known examples; none of them should give ranks afterwards.
        usual: The usual terms and their weights; the last tap is the end of the last block.
        first_class_tap: The first tap of the last blocks.
        classes: Whether distances to classes are measured.
        far: Returns families of far outliers; None where there are none to check with. It is asked
            only where left-out classes gain.
        without: Kinds that may not join.
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
        fold, terms = _fold(examples, groups, left_out, heard, late, classes)
        weights = torch.zeros(len(terms), dtype=torch.float64)
        for (kind, tap), weight in usual.items():
            if kind == "absent":  # of classes that no fold has
                continue
            of_trunk = kind == "distance" and tap < taps - 1
            for heard_tap in trunk if of_trunk else (tap,):
                share = weight / len(trunk) if of_trunk else weight
                weights[terms.index((kind, heard_tap))] += share
        folds.append(_with_sum(fold, weights * SHARE / weights.sum()))
    candidates = [
        1 + place
        for place, (kind, tap) in enumerate(terms)
        if tap >= first_class_tap and kind not in without
    ]
    if classes:  # clusters say nothing about probabilities
        candidates += [1 + place for place, (_, tap) in enumerate(terms) if tap < 0]
    verdict, checked = judged(folds, candidates), ""
    if classes and verdict.before >= FOUND and ("absent", -1) not in usual:
        found = f"left-out classes are found anyway, AUROC {verdict.before:.1f}"
        return longer_sum(usual, {("class", taps - 1): (100 - verdict.before) / LEARNED}, found)
    if verdict.gains:
        families = far()
        if families is None:
            return Choice(usual, note="the usual terms (no far outliers to check others with)")
        folds = [replace(f, far=[f.columns(x) for x in families.values()]) for f in folds]
        verdict = judged(folds, candidates)
        checked = ", checked on far outliers" if families else ""
    figure = f"AUROC of left-out {'classes' if classes else 'clusters'}{checked}"
    if not verdict.clear:
        before, after = f"{verdict.before:.1f}", f"{verdict.after:.1f}"
        return Choice(usual, note=f"the usual terms ({figure} {before}, with others {after})")
    more = dict[Term, float]()
    for step, column in enumerate(select(folds, candidates)):
        term = terms[column - 1]
        more[term] = more.get(term, 0.0) + GROWTH**step / SHARE
    return longer_sum(usual, more, f"{figure} {verdict.after:.1f}, without {verdict.before:.1f}")


def longer_sum(usual: dict[Term, float], more: dict[Term, float], why: str) -> Choice:
    """Return the choice of the usual terms and more, whose weights are parts of the usual sum's."""
    whole = 1 + sum(more.values())
    # no fold has absent classes: their share stays
    weights = {(k, tap): w * (whole if k == "absent" else 1) for (k, tap), w in usual.items()}
    total = sum(weight for (kind, _), weight in usual.items() if kind != "absent")
    for term, weight in more.items():
        weights[term] = weights.get(term, 0.0) + weight * total
    joined = {term: weight / whole for term, weight in more.items()}
    return Choice(weights, joined, f"the usual terms and others ({why})")


def judged(folds: Sequence[Fold], candidates: Sequence[int]) -> Verdict:
    """Judge sums on the classes of each fold, chosen on the other folds."""
    gains, losses, figures = [], [], []
    for fold in folds:
        joined = select([other for other in folds if other is not fold], candidates)

        def sums(columns: Tensor, joined: Sequence[int] = joined) -> Tensor:
            return torch.stack([columns[:, 0], summed(columns, joined)], 1)

        known = sums(fold.known)
        shares = 100 * shares_below(known, sums(fold.near))
        figures.append(shares.mean(0))
        gain = shares[:, 1] - shares[:, 0]
        gains += [float(gain[fold.groups == group].mean()) for group in fold.groups.unique()]
        for family in fold.far:
            share = 100 * shares_below(known, sums(family)).mean(0)
            losses.append(float(share[0] - share[1]))
    before, after = torch.stack(figures).mean(0).tolist()
    every = torch.tensor(gains)
    low = float(every.mean() - 1.96 * every.std() / len(every) ** 0.5)
    lost = torch.tensor(losses, dtype=torch.float64).view(len(folds), -1).mean(0)
    allowed = allowed_loss(_figures(folds, [], [-1])[1][:, 0])
    return Verdict(before, after, low, lost, allowed)


def summed(columns: Tensor, joined: Sequence[int]) -> Tensor:
    """Return the first column and those that joined: each an eighth of the sum before it."""
    weights = [1.0, *(GROWTH**step for step in range(len(joined)))]
    return columns[:, [0, *joined]] @ torch.tensor(weights, dtype=columns.dtype)


def allowed_loss(found: Tensor) -> Tensor:
    """Return what may be lost on families that the usual sum finds so well, in percent."""
    return FAR_LOSS + SHORT_LOSS * (100 - found)


def select(folds: Sequence[Fold], candidates: Sequence[int]) -> list[int]:
    """Return the columns that join the first one, step by step; one may join again.

    The last column is zero: the sum as it is.
    """
    joined: list[int] = []
    best, floor = (values[..., 0] for values in _figures(folds, joined, [-1]))
    while len(joined) < MOST_TERMS:
        near, far = _figures(folds, joined, candidates)
        safe = (far >= (floor - allowed_loss(floor))[:, None]).all(0)
        near = near.masked_fill(~safe, -torch.inf)
        place = int(near.argmax())
        if near[place] - best < STEP_GAIN:
            break
        best = near[place]
        joined.append(candidates[place])
    return joined


def _figures(
    folds: Sequence[Fold], joined: Sequence[int], more: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return AUROC in percent of the first column with `joined` and each of `more`.

    Of left-out classes `[more]`, the mean over folds, and of far families `[family, more]`.
    """

    def sums(columns: Tensor) -> Tensor:
        return summed(columns, joined)[:, None] + GROWTH ** len(joined) * columns[:, list(more)]

    near, far = [], []
    for fold in folds:
        known = sums(fold.known)
        near.append(shares_below(known, sums(fold.near)).mean(0))
        far.append([shares_below(known, sums(family)).mean(0) for family in fold.far])
    found = 100 * torch.stack(near).mean(0)
    families = [100 * torch.stack(family).mean(0) for family in zip(*far, strict=True)]
    return found, torch.stack(families) if families else found.new_zeros(0, len(more))


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

    def columns(found: Examples) -> Tensor:
        return ranks.surprise(measures(found.features[:, heard], probability(found)))

    assert examples.probability is not None
    near = columns(Examples(examples.features[left_out], examples.probability[left_out]))
    fold = Fold(ranks.held_out_surprise(known), near, groups[left_out], columns)
    return fold, [(kind, heard[tap] if tap >= 0 else tap) for kind, tap in measures.terms]


def _with_sum(fold: Fold, weights: Tensor) -> Fold:
    """Put the weighted sum of all columns first, and zeros last."""

    def wider(columns: Tensor) -> Tensor:
        total = (columns @ weights)[:, None]
        return torch.cat([total, columns, torch.zeros_like(total)], 1)

    return Fold(
        wider(fold.known), wider(fold.near), fold.groups, lambda found: wider(fold.columns(found))
    )


def clusters(rows: Tensor, count: int = CLUSTERS) -> Tensor:
    """Return the clusters of rows by Lloyd's algorithm, from rows that lie evenly in the data."""
    centres = rows[:: max(1, len(rows) // count)][:count].clone()
    for _ in range(20):
        nearest = torch.cdist(rows, centres).argmin(1)
        for cluster in nearest.unique():
            centres[cluster] = rows[nearest == cluster].mean(0)
    return nearest
