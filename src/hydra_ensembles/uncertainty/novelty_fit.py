"""Fit novelty to known data in one pass: add batches of token summaries, then finish.

Kept while fitting: the moments (see `moments.py`) and the token summaries of at most `RANKED`
examples, which become the held-out values that new inputs are ranked among.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import DataError
from .distances import unit
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
        if not bool(summaries.isfinite().all()):
            raise DataError(
                "Hidden states of the known data hold NaN or infinity: check the inputs and the "
                "model's precision."
            )
        self._labelled = self._labelled and labels is not None
        classes = labels.cpu().long() if self._labelled and labels is not None else None
        summaries = summaries.float().cpu()
        if self.moments is None:
            _, taps, width = summaries.shape
            self.moments = Moments.empty(
                taps,
                width,
                self.number if self._labelled else 0,
                first_class_tap=self.first_class_tap,
            )
        self.moments.add_(summaries, classes)
        room = RANKED - sum(map(len, self._scores))
        if room > 0:
            self._summaries.append(summaries[:room])
            self._scores.append(gen(member_logits)[:room].double().cpu())
            if classes is not None:
                self._labels.append(classes[:room])

    def finish(self, names: Sequence[str] = ()) -> Novelty:
        """Return the fitted statistics, in float32.

        Args:
            names: Names of the known examples by position, for `Evidence`.
        """
        moments = self.moments
        if moments is None or moments.count < LEAST:
            found = 0 if moments is None else moments.count
            raise DataError(
                f"Novelty needs at least {LEAST} known examples, better some hundred; found "
                f"{found}."
            )
        features = unit(torch.cat(self._summaries).double())
        distance = global_distance(moments)
        held_out = distance.held_out(features)
        terms = [held_out]
        classes = None
        if self._labelled and self._enough(moments.class_counts):
            late = slice(self.first_class_tap, None)
            classes = class_distance(moments)
            # classes without examples are left out
            number = (moments.class_counts > 0).cumsum(0) - 1
            nearest = classes.held_out(features[:, late], number[torch.cat(self._labels)])
            terms.append(class_terms(nearest, held_out[:, late], hears_end=self.hears_end))
        terms.append(torch.cat(self._scores)[:, None])
        values = torch.cat(terms, 1)
        ranks = Ranks.of(values)
        last = features[:BANK, -1]
        unranked = Novelty(
            taps=self.taps,
            distance=distance,
            classes=classes,
            first_class_tap=self.first_class_tap,
            weights=term_weights(
                len(self.taps), terms[1].shape[1] if classes else 0, hears_end=self.hears_end
            ).double(),
            ranks=ranks,
            sums=Ranks.of(values[:, :1]),  # replaced below: they need the weights
            bank=last,
            bank_positions=torch.arange(len(last)),
            names=tuple(names)[: len(last)],
            examples=moments.count,
            hears_end=self.hears_end,
            precision=self.precision,
        )
        score = unranked.total(ranks.held_out_surprise(values))
        return replace(unranked, sums=Ranks.of(score[:, None])).single()

    def _enough(self, counts: Tensor) -> bool:
        present = counts[counts > 0]
        return len(present) >= FEWEST_CLASSES and float(present.double().mean()) >= PER_CLASS
