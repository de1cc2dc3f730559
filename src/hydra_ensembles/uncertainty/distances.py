"""How far unit features lie from known data: what the terms of novelty are measured with.

    distance   d(f) = (f - mu)^T Sigma^-1 (f - mu)                     arXiv 2505.18032, no labels
    class      c(f) = min_c (f - mu_c)^T Sigma_w^-1 (f - mu_c)         arXiv 1807.03888
    relative   c(f) - d(f)                                             arXiv 2106.09022
    neighbour  -max_i f . f_i, over known examples                     arXiv 2204.06507 with k = 1
    cosine     -max_c f . mu_c / |mu_c|
    absent     sum over c of p_c, of the classes that no known example has

Sigma = S / n + ridge I with the scatter S of the known data, Sigma_w the same around class means;
`moments.py` fits them. Larger is further away, **so a higher value speaks for a new input**, as
everywhere.

A known example's own value is too small: it helped to place mu and Sigma, and is its own nearest
neighbour. Leaving it out has closed forms (Sherman and Morrison): with d the distance under all n
examples, its distance under the others is n d / (n - 1 - d) if the ridge is spread over n - 1
examples as it was over n. It is not: the ridge stays what it is, which adds a term of first order
in 1 / n (`GlobalDistance.held_out`). So every known example is held out once, in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .scores import entropy_of, gen_of

Term = tuple[str, int]
"""Kind and tap of a term; those of the probability (`gen`, `entropy`, `absent`) have tap -1."""
CLASSES = 1024
"""Classes that one step measures distances to, so that many classes need no more memory."""
CELLS = 2**22
"""Distances of held-out examples to classes that one step holds."""
EXACT_CLASSES = 1024
"""Classes up to which held-out distances to classes keep the ridge: with more there are so many
examples that it does not matter."""
SAME = 1 - 1e-5
"""Largest cosine to a neighbour: beyond it, rounding to float32 would decide the rank."""


def unit(features: Tensor) -> Tensor:
    """Return features `[..., width]` at length 1 (a zero vector stays)."""
    lengths: Tensor = features.norm(dim=-1, keepdim=True)
    return features / lengths.clamp_min(1e-12)


@dataclass(frozen=True)
class Whitening:
    """W with W W^T = Sigma^-1, per tap.

    Few examples span few directions of a wide host, and in all others Sigma is the ridge. Then
    W = level (I - B B^T) with as many columns in B as there are examples: n d numbers, not d^2.

    Attributes:
        matrix: W, `[tap, width, width]`; with a level, B, `[tap, width, example]`.
        level: 1 / sqrt(ridge), `[tap]`; None for a W without structure.
    """

    matrix: Tensor
    level: Tensor | None = None

    def __call__(self, apart: Tensor) -> Tensor:
        """Return (f - mu) W of differences `[tap, example, width]`."""
        white = torch.bmm(apart, self.matrix)
        if self.level is None:
            return white
        inside = torch.bmm(white, self.matrix.transpose(1, 2))
        return self.level[:, None, None] * (apart - inside)

    def transposed(self, white: Tensor) -> Tensor:
        """Return w W^T of `[tap, example, width]`; with a level W is symmetric."""
        if self.level is not None:
            return self(white)
        return torch.bmm(white, self.matrix.transpose(1, 2))


@dataclass(frozen=True)
class GlobalDistance:
    """Distance to all known data, per tap.

    Attributes:
        mean: mu, `[tap, width]`.
        whitening: W with W W^T = Sigma^-1; d(f) = |(f - mu) W|^2.
        count: Known examples n.
        ridge: Of every tap; only held-out distances need it, so that it is not saved.
    """

    mean: Tensor
    whitening: Whitening
    count: int
    ridge: Tensor | None = None

    def __call__(self, features: Tensor) -> Tensor:
        """Return the distance of unit features `[example, tap, width]`, `[example, tap]`."""
        apart = (features - self.mean).transpose(0, 1)
        return self.whitening(apart).square().sum(-1).T

    def held_out(self, features: Tensor) -> Tensor:
        """Return the distance of known examples to all others, `[example, tap]`.

        With A = n Sigma, z = f - mu and k = n / (n - 1), the others have A' = A - k z z^T - ridge I
        and z' = k z. The distance is (n - 1) z'^T A'^-1 z'; to first order the ridge adds
        ridge z^T A^-2 z / (1 - k z^T A^-1 z)^2 to z^T A'^-1 z. Without it, distances of data that
        spreads evenly in many directions come out too small by 1 / n, and new inputs look new.
        """
        count, white = self.count, self.whitening((features - self.mean).transpose(0, 1))
        lever = white.square().sum(-1).T / count
        share = count / (count - 1)
        left = 1 - share * lever
        inverse = lever / left
        if self.ridge is not None:
            again = self.whitening.transposed(white).square().sum(-1).T / count**2
            inverse = inverse + self.ridge * again / left.square()
        return (count - 1) * share**2 * inverse


@dataclass(frozen=True)
class ClassDistance:
    """Distance to the nearest class, per tap.

    Attributes:
        centre: mu, `[tap, width]`, taken from features first: whitened features are long, and
            float32 would lose their differences.
        means: (mu_c - mu) W of the known classes, `[tap, class, width]`.
        whitening: W with W W^T = Sigma_w^-1, the covariance within classes.
        counts: Known examples per class, `[class]`, none empty.
        ridge: Of every tap; only held-out distances need it, so that it is not saved.
    """

    centre: Tensor
    means: Tensor
    whitening: Whitening
    counts: Tensor
    ridge: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """Squared lengths of the means, `[tap, class]`."""
        parts = [part.square().sum(-1) for part in self.means.split(CLASSES, 1)]
        return torch.cat(parts, 1)

    @cached_property
    def means_back(self) -> Tensor:
        """Sigma_w^-1 (mu_c - mu), `[tap, class, width]`."""
        return self.whitening.transposed(self.means)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the distance of unit features `[example, tap, width]`, `[example, tap]`."""
        white = self.whitening((features - self.centre).transpose(0, 1))
        length = white.square().sum(-1)
        nearest: Tensor | None = None
        chunks = zip(self.means.split(CLASSES, 1), self.lengths.split(CLASSES, 1), strict=True)
        for means, lengths in chunks:
            square = lengths[:, None] - 2 * white @ means.transpose(1, 2)
            smallest = square.amin(-1)
            nearest = smallest if nearest is None else torch.minimum(nearest, smallest)
        assert nearest is not None
        return (length + nearest).clamp_min(0).T

    def held_out(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the distance of known examples to the classes of all others, `[example, tap]`.

        Without example i of class y (n_y examples, k = n_y / (n_y - 1), z = f - mu_y) the class
        mean moves to mu_y - z / (n_y - 1) and the scatter loses k z z^T. The ridge stays what it is
        (see `GlobalDistance.held_out`): to v^T A'^-1 v this adds ridge |A'^-1 v|^2.
        """
        rows = max(1, CELLS // self.lengths.numel())
        parts = zip(features.split(rows), classes.split(rows), strict=True)
        return torch.cat([self._held_out(some, known) for some, known in parts])

    def _held_out(self, features: Tensor, classes: Tensor) -> Tensor:
        count = int(self.counts.sum())
        white = self.whitening((features - self.centre).transpose(0, 1))
        to_means = white @ self.means.transpose(1, 2)
        square = white.square().sum(-1, keepdim=True) + self.lengths[:, None] - 2 * to_means
        number = self.counts[classes].to(white.dtype)
        share = number / (number - 1).clamp_min(1)  # k
        own_mean = self.means[:, classes]
        apart = white - own_mean
        lever = apart.square().sum(-1) / count  # z^T A^-1 z, with A = n Sigma_w
        gain = share / (1 - share * lever)
        across = (apart * white).sum(-1, keepdim=True) - apart @ self.means.transpose(1, 2)
        across = across / count
        others = (count - 1) * (square.clamp_min(0) / count + gain[..., None] * across.square())
        own = (count - 1) * share * gain * lever
        if self.ridge is not None and len(self.counts) <= EXACT_CLASSES:
            ridge = (count - 1) / count**2 * self.ridge[:, None]
            back, there = (self.whitening.transposed(part) for part in (apart, white))
            to = self.means_back
            length, turn = back.square().sum(-1), gain[..., None] * across
            square = there.square().sum(-1, keepdim=True) - 2 * there @ to.transpose(1, 2)
            square = square + to.square().sum(-1)[:, None] + turn.square() * length[..., None]
            along = (there * back).sum(-1, keepdim=True) - back @ to.transpose(1, 2)
            others = others + ridge[..., None] * (square + 2 * turn * along)
            own = own + ridge * gain.square() * length
        own = torch.where(number > 1, own, torch.inf)  # its class goes with it
        index = classes.expand(len(own), -1)[..., None]
        return others.scatter(2, index, own[..., None]).amin(-1).T


@dataclass(frozen=True)
class Measures:
    """All that terms are measured with.

    Attributes:
        distance: To all known data, at every tap.
        classes: To the nearest class, at the taps from `first_class_tap` on; None without classes.
        first_class_tap: See `classes`.
        neighbours: Unit features of known examples, `[tap, example, width]`; None without.
        neighbour_taps: The taps of `neighbours`.
        totals: Sums of the unit features of each class, `[tap, class, width]`; None without.
        cosine_taps: The taps of `totals`.
        probable: Whether there are scores of probabilities: not every task has classes.
        absent: `[class]`, 0 for each class of the known data, 1 for each that the host learned
            and no known example has, -1 for other outputs; None where there is no 1.
    """

    distance: GlobalDistance
    classes: ClassDistance | None
    first_class_tap: int
    neighbours: Tensor | None = None
    neighbour_taps: tuple[int, ...] = ()
    totals: Tensor | None = None
    cosine_taps: tuple[int, ...] = ()
    probable: bool = True
    absent: Tensor | None = None

    @property
    def terms(self) -> list[Term]:
        """What is measured, in the order of the values."""
        taps = range(len(self.distance.mean))
        late = taps[self.first_class_tap :] if self.classes is not None else ()
        found = [("distance", tap) for tap in taps]
        found += [(kind, tap) for kind in ("class", "relative") for tap in late]
        found += [("neighbour", tap) for tap in self.neighbour_taps]
        found += [("cosine", tap) for tap in self.cosine_taps]
        found += [("gen", -1), ("entropy", -1)] if self.probable else []
        return found if self.absent is None else [*found, ("absent", -1)]

    def __call__(
        self,
        features: Tensor,
        probability: Tensor | None,
        *,
        rows: Tensor | None = None,
        classes: Tensor | None = None,
    ) -> Tensor:
        """Return all values of unit features `[example, tap, width]`, `[example, term]`.

        Args:
            features: Unit features.
            probability: Mean probability of the members, `[example, class]`; None without any.
            rows: Numbers of the examples among the neighbours, if they are known examples: each of
                them is then left out of all statistics.
            classes: Classes of known examples, as numbers among the known classes.
        """
        held_out = rows is not None
        distance = self.distance.held_out(features) if held_out else self.distance(features)
        parts = [distance]
        if self.classes is not None:
            late = features[:, self.first_class_tap :]
            if held_out and classes is not None:
                nearest = self.classes.held_out(late, classes)
            else:
                nearest = self.classes(late)
            parts += [nearest, nearest - distance[:, self.first_class_tap :]]
        if self.neighbours is not None:
            near = _at(features, self.neighbour_taps)
            similar = near @ self.neighbours.transpose(1, 2)
            if rows is not None:
                index = rows.expand(len(similar), -1)[..., None]
                similar = similar.scatter(2, index, -torch.inf)
            parts.append(-similar.amax(-1).clamp_max(SAME).T)
        if self.totals is not None:
            parts.append(self._cosine(_at(features, self.cosine_taps), held_out, classes))
        if probability is not None:
            scores = torch.stack([gen_of(probability), entropy_of(probability)], 1)
            parts.append(scores.to(distance.dtype))
            if self.absent is not None:
                share = self._absent(probability, held_out, classes)
                parts.append(share[:, None].to(distance.dtype))
        return torch.cat(parts, 1)

    def _absent(self, probability: Tensor, held_out: bool, classes: Tensor | None) -> Tensor:
        assert self.absent is not None
        share: Tensor = probability @ (self.absent > 0).to(probability.dtype)
        if not held_out or classes is None or self.classes is None:
            return share
        # a class of one example goes with it
        own = (self.absent == 0).nonzero()[classes]
        alone = self.classes.counts[classes] == 1
        return share + probability.gather(1, own)[:, 0] * alone

    def _cosine(self, features: Tensor, held_out: bool, classes: Tensor | None) -> Tensor:
        assert self.totals is not None
        similar = features @ unit(self.totals).transpose(1, 2)
        if held_out and classes is not None:
            others = self.totals[:, classes] - features
            own = (unit(others) * features).sum(-1, keepdim=True)
            # a class of one example goes with it
            own = torch.where(others.norm(dim=-1, keepdim=True) > 1e-6, own, -1.0)
            index = classes.expand(len(similar), -1)[..., None]
            similar = similar.scatter(2, index, own)
        return -similar.amax(-1).T


def _at(features: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Return the features `[example, tap, width]` of some taps, `[tap, example, width]`."""
    return torch.stack([features[:, tap] for tap in taps])
