"""Fit novelty to known data in one pass: add batches of token summaries, then finish.

Kept while fitting: the moments (see `moments.py`) and the token summaries of at most `RANKED`
examples, which become the held-out values that new inputs are ranked among. Where training data is
added too, the moments are those of the training data, and known data only gives the ranks: it took
no part in the distances, so that it needs no leaving out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import DataError
from .distances import ClassDistance, GlobalDistance, unit
from .moments import Moments, class_distance, global_distance
from .novelty import Novelty, Ranks, class_terms, term_weights
from .scores import gen

RANKED = 2048
"""Known examples that ranks are kept of: enough for false-alarm rates of 0.1 %."""
BANK = 512
"""Known examples that can be named as neighbours."""
PER_CLASS = 5
"""Known examples per class, on average, from which on class distances are used."""
FEWEST_CLASSES = 3
"""Classes from which on class distances are used: two span one direction, the probability's."""
LEAST = 10
"""Fewest known examples."""
STEP = 256
"""Examples whose distances are computed together."""


class NoveltyFit:
    """Statistics of known data while they grow.

    Args:
        taps: Names of the taps, in the order of the summaries.
        classes: Number of classes, for class distances when batches have labels; 0 for none.
        class_taps: Number of taps, from the last, that measure class distances.
        hears_end: Whether the last tap is the end of the last block (see `Novelty`).
        precision: In which the summaries are computed (see `Novelty`).
    """

    def __init__(
        self,
        taps: Sequence[str],
        *,
        classes: int = 0,
        class_taps: int = 0,
        hears_end: bool = False,
        precision: str = "float32",
    ) -> None:
        self.taps, self.number, self.hears_end = tuple(taps), classes, hears_end
        self.precision = precision
        self.first_class_tap = len(self.taps) - class_taps
        self.moments: Moments | None = None
        self.examples = self.trained = 0
        self._summaries: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._labelled = classes > 0 and class_taps > 0

    def add_(self, summaries: Tensor, member_logits: Tensor, labels: Tensor | None = None) -> None:
        """Add known examples, in place.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            member_logits: Raw logits `[example, member, class]`.
            labels: `[example]`; class distances need them in every batch.
        """
        summaries = _finite(summaries, "known")
        room = RANKED - sum(map(len, self._scores))
        if room > 0:
            self._summaries.append(summaries[:room])
            self._scores.append(gen(member_logits)[:room].double().cpu())
        self.examples += len(summaries)
        if self.trained:
            return
        classes = self._add_moments(summaries, labels)
        if room > 0 and classes is not None:
            self._labels.append(classes[:room])

    def add_train_(self, summaries: Tensor, labels: Tensor | None = None) -> None:
        """Add training examples, in place, before any known ones: means and covariances are theirs.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            labels: `[example]`; class distances need them in every batch.
        """
        if self.examples:
            raise DataError("Add the training data before the known data.")
        self._add_moments(_finite(summaries, "training"), labels)
        self.trained += len(summaries)

    def _add_moments(self, summaries: Tensor, labels: Tensor | None) -> Tensor | None:
        self._labelled = self._labelled and labels is not None
        classes = labels.cpu().long() if self._labelled and labels is not None else None
        if self.moments is None:
            _, taps, width = summaries.shape
            self.moments = Moments.empty(
                taps,
                width,
                self.number if self._labelled else 0,
                first_class_tap=self.first_class_tap,
            )
        self.moments.add_(summaries, classes)
        return classes

    def finish(self, names: Sequence[str] = ()) -> Novelty:
        """Return the fitted statistics, in float32.

        Args:
            names: Names of the known examples by position, for `Evidence`.
        """
        moments = self.moments
        if moments is None or min(moments.count, self.examples) < LEAST:
            training = f" and {self.trained} training examples" if self.trained else ""
            raise DataError(
                f"Novelty needs at least {LEAST} known examples, better some hundred; found "
                f"{self.examples}{training}."
            )
        distance, classes = global_distance(moments), None
        if self._labelled and self._enough(moments.class_counts):
            classes = class_distance(moments)
        values = torch.cat([self._held_out(distance, classes), torch.cat(self._scores)[:, None]], 1)
        ranks = Ranks.of(values)
        last = unit(torch.cat([rows[:, -1] for rows in self._summaries])[:BANK].double())
        unranked = Novelty(
            taps=self.taps,
            distance=distance,
            classes=classes,
            first_class_tap=self.first_class_tap,
            weights=term_weights(
                len(self.taps),
                0 if classes is None else len(classes.means),
                hears_end=self.hears_end,
            ).double(),
            ranks=ranks,
            sums=Ranks.of(values[:, :1]),  # replaced below: they need the weights
            bank=last,
            bank_positions=torch.arange(len(last)),
            names=tuple(names)[: len(last)],
            examples=self.examples,
            trained=self.trained,
            hears_end=self.hears_end,
            precision=self.precision,
        )
        score = unranked.total(ranks.held_out_surprise(values))
        return replace(unranked, sums=Ranks.of(score[:, None])).single()

    def _held_out(self, distance: GlobalDistance, classes: ClassDistance | None) -> Tensor:
        """Return the distances of the kept examples, each without itself, `[example, term]`."""
        assert self.moments is not None
        # classes without examples are left out
        number = (self.moments.class_counts > 0).cumsum(0) - 1
        summaries, late = torch.cat(self._summaries), slice(self.first_class_tap, None)
        found = []
        for rows in torch.arange(len(summaries)).split(STEP):
            features = unit(summaries[rows].double())
            terms = [distance(features) if self.trained else distance.held_out(features)]
            if classes is not None:
                if self.trained:
                    nearest = classes(features[:, late])
                else:
                    known = number[torch.cat(self._labels)[rows]]
                    nearest = classes.held_out(features[:, late], known)
                terms.append(class_terms(nearest, terms[0][:, late], hears_end=self.hears_end))
            found.append(torch.cat(terms, 1))
        return torch.cat(found)

    def _enough(self, counts: Tensor) -> bool:
        present = counts[counts > 0]
        return len(present) >= FEWEST_CLASSES and float(present.double().mean()) >= PER_CLASS


def _finite(summaries: Tensor, kind: str) -> Tensor:
    """Return summaries on the CPU in float32, or refuse them."""
    if not bool(summaries.isfinite().all()):
        raise DataError(
            f"Hidden states of the {kind} data hold NaN or infinity: check the inputs and the "
            "model's precision."
        )
    return summaries.float().cpu()
