"""Fit novelty to known data in one pass: add batches of token summaries, then finish.

Kept while fitting: the moments (see `moments.py`) and the token summaries of some thousand
examples, evenly over the data, which become the held-out values that new inputs are ranked among.
Where training data is added too, the moments are those of the training data, and known data only
gives the ranks: it took no part in the distances, so that it needs no leaving out.

Where the terms are chosen (`term_choice.py`), that is done on one half of the kept known examples,
and the other half gives the ranks. That half took no part in the choice, so that it is exchangeable
with new inputs, and the rate of false alarms holds whatever was chosen. If known data that comes
with training data is too small or lacks labels, the training data chooses, and all known data gives
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .distances import Measures, unit
from .known_ranges import FACTS, KnownRanges, Scale
from .moments import Moments, class_distance, global_distance
from .novelty import KINDS, Novelty, Ranks, names_by_position, usual_terms
from .scores import mean_probability
from .term_choice import LEAST_EXAMPLES, LEAST_PER_CLASS, Choice, Examples, choose_terms

KEPT = 2**27
"""Numbers of token summaries that are kept, about; at least 1,024 examples are."""
BANK = 512
"""Known examples that can be named as neighbours."""
PER_CLASS = 5
"""Known examples per class, on average, from which on class distances are used."""
FEWEST_CLASSES = 3
"""Classes from which on class distances are used: two span one direction, the probability's."""
LEAST = 10
"""Fewest known examples."""
COLUMNS = {"names", "heads", "hashes", "script", *FACTS}
"""What is kept of known examples beside their features."""
STEP = 256
"""Examples whose distances are computed together."""


class NoveltyFit:
    """Statistics of known data while they grow.

    Args:
        taps: Names of the taps, in the order of the summaries.
        classes: Number of classes, for class distances when batches have labels; 0 for none.
        class_taps: Number of taps, from the last, that measure class distances.
        uses_last_block: Whether the last tap is the end of the last block.
        precision: In which the summaries are computed (see `Novelty`).
        choose: Whether terms may be chosen by classes that are left out of the known data.
        without: Kinds of terms that may not be chosen.
    """

    def __init__(
        self,
        taps: Sequence[str],
        *,
        classes: int = 0,
        class_taps: int = 0,
        uses_last_block: bool = False,
        precision: str = "float32",
        choose: bool = True,
        without: Collection[str] = (),
    ) -> None:
        self.taps, self.number, self.uses_last_block = tuple(taps), classes, uses_last_block
        self.precision, self.choose, self.without = precision, choose, without
        self.first_class_tap = len(self.taps) - class_taps
        self.moments: Moments | None = None
        self.examples = self.trained = 0
        self._labelled = classes > 0 and class_taps > 0
        self._known, self._train = KeptExamples(), KeptExamples()
        self._far: dict[str, KeptExamples] = {}
        self._columns: dict[str, list[Any]] = {}

    def add_(
        self, summaries: Tensor, member_logits: Tensor | None, labels: Tensor | None = None
    ) -> None:
        """Add known examples, in place.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            member_logits: Raw logits `[example, member, class]`; None in tasks without classes.
            labels: `[example]`; class distances need them in every batch.
        """
        summaries = _finite(summaries, "known")
        self.examples += len(summaries)
        if not self.trained:
            self._add_moments(summaries, labels)
        self._known.add_(summaries, member_logits, labels)

    def add_train_(
        self, summaries: Tensor, member_logits: Tensor | None, labels: Tensor | None = None
    ) -> None:
        """Add training examples, in place, before any known ones: means and covariances are theirs.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            member_logits: Raw logits `[example, member, class]`.
            labels: `[example]`; class distances need them in every batch.
        """
        if self.examples:
            raise DataError("Add the training data before the known data.")
        summaries = _finite(summaries, "training")
        self.trained += len(summaries)
        self._add_moments(summaries, labels)
        self._train.add_(summaries, member_logits, labels)

    def add_ood_(self, name: str, summaries: Tensor, member_logits: Tensor | None) -> None:
        """Add outliers of one family, in place: terms are chosen to find them too."""
        kept = self._far.setdefault(name, KeptExamples())
        kept.add_(_finite(summaries, name), member_logits, None)

    def add_columns_(self, columns: Mapping[str, Any]) -> None:
        """Add what else is known of the known examples, in their order, in place.

        A column counts where it has a value for every example: `names`, `heads` (first tokens, from
        which names can be decoded), `hashes` and the facts of `KnownRanges`; others are ignored.
        """
        for name, column in columns.items():
            if name in COLUMNS:
                self._columns.setdefault(name, []).append(column)

    def _add_moments(self, summaries: Tensor, labels: Tensor | None) -> None:
        self._labelled = self._labelled and labels is not None
        if self.moments is None:
            _, taps, width = summaries.shape
            self.moments = Moments.empty(
                taps,
                width,
                self.number if self._labelled else 0,
                first_class_tap=self.first_class_tap,
            )
        classes = labels.cpu().long() if self._labelled and labels is not None else None
        self.moments.add_(summaries, classes)

    def finish(
        self,
        names: Sequence[str] = (),
        *,
        decode: Callable[[Tensor], Sequence[str]] | None = None,
        image_scale: Scale | None = None,
        add_proxies: Callable[[], None] | None = None,
    ) -> Novelty:
        """Return the fitted statistics, in float32.

        Args:
            names: Names of the known examples, instead of the column `names`.
            decode: Makes names of the column `heads`, where there is no column `names`.
            image_scale: What images were normalised by (see `KnownRanges`).
            add_proxies: Adds far outliers by `add_ood_`, if a choice of terms needs them; raises
                `DataError` where none can be made.
        """
        moments = self.moments
        if moments is None or min(moments.count, self.examples) < LEAST:
            training = f" and {self.trained} training examples" if self.trained else ""
            raise DataError(
                f"Novelty needs at least {LEAST} known examples, better some hundred; found "
                f"{self.examples}{training}."
            )
        if names and len(names) != self.examples:
            raise DataError(
                f"There are {len(names)} names for {self.examples} known examples; expected one "
                "each."
            )
        present = moments.class_counts > 0
        classes = int(present.sum())
        enough = classes >= FEWEST_CLASSES and moments.count >= PER_CLASS * classes
        labelled = self._labelled and enough
        absent = self._absent(present) if labelled and self._known.probable else None
        terms = usual_terms(
            len(self.taps),
            self.first_class_tap,
            classes=labelled,
            uses_last_block=self.uses_last_block,
            probability=(0.5 if self.number == 2 else 1.0) if self._known.probable else 0.0,
            absent=absent is not None,
        )
        kept = self._train if self.trained else self._known
        first, second = self._known.halves()
        # the host learned the training data: classes left out of it are found too easily
        least = max(LEAST_EXAMPLES, LEAST_PER_CLASS * classes if labelled else 0)
        able = len(first) >= least and (self._known.labelled or not labelled)
        by_known = able or not self.trained
        choice = Choice(terms)
        if self.choose and self.uses_last_block:
            choice = choose_terms(
                self._known.rows(first) if by_known else kept.rows(torch.arange(kept.count)),
                terms,
                first_class_tap=self.first_class_tap,
                classes=labelled,
                far=lambda: self._families(add_proxies),
                without=self.without,
            )
        # the half that the choice saw is ranked only where nothing was chosen
        every = torch.arange(self._known.count)
        ranked = second if choice.joined and by_known else every
        measures = self._measures(moments, labelled, choice, kept, absent)
        values = self._values(measures, choice, ranked)
        ranks = Ranks.of(values)
        weights = torch.tensor(list(choice.weights.values()), dtype=torch.float64)
        score = (ranks.held_out_surprise(values) @ weights)[:, None]
        bank = every[:: -(-len(every) // BANK)]
        last = self._known.rows(bank).features[:, -1]
        positions = self._known.positions[bank]
        columns = {name: _joined(parts) for name, parts in self._columns.items()}
        columns = {name: c for name, c in columns.items() if len(c) == self.examples}
        columns |= {"names": names} if names else {}
        return Novelty(
            taps=self.taps,
            measures=measures,
            chosen=tuple(choice.weights),
            weights=weights,
            ranks=ranks,
            sums=Ranks.of(score),
            bank=last,
            bank_positions=positions,
            names=_names(columns, positions, decode),
            hashes=columns.get("hashes"),
            ranges=KnownRanges.of(columns, image_scale),
            examples=self.examples,
            trained=self.trained,
            precision=self.precision,
            choice=self._said(choice),
        ).single()

    def _absent(self, present: Tensor) -> Tensor | None:
        """Say which classes the host learned and no known example has (see `Measures`).

        An output that was never trained gives no known example more than chance, 1 / classes.
        """
        learned = self._known.largest_probability > 1 / len(present)
        absent = torch.where(present, 0.0, torch.where(learned, 1.0, -1.0)).double()
        return absent if bool((absent > 0).any()) else None

    def _families(self, add_proxies: Callable[[], None] | None) -> dict[str, Examples] | None:
        """Return the far outliers; None where none were given and none can be made."""
        if add_proxies is not None:
            try:
                add_proxies()
            except DataError:  # neither images nor token ids, or data that is read once
                if not self._far:
                    return None
        return {name: found.rows(torch.arange(found.count)) for name, found in self._far.items()}

    def _said(self, choice: Choice) -> str:
        """Say which terms are summed and why."""
        joined = [
            f"{share:.0%} {KINDS[kind].format(self.taps[tap])}"
            for (kind, tap), share in choice.joined.items()
        ]
        return f"{choice.note}: {' + '.join(joined)}" if joined else choice.note

    def _measures(
        self,
        moments: Moments,
        labelled: bool,
        choice: Choice,
        kept: KeptExamples,
        absent: Tensor | None,
    ) -> Measures:
        """Fit what the chosen terms are measured with."""
        near, cosine = (choice.taps(kind) for kind in ("neighbour", "cosine"))
        neighbours = totals = None
        if near:
            neighbours = kept.rows(torch.arange(kept.count)).features[:, near].transpose(0, 1)
        if cosine:
            late = [tap - self.first_class_tap for tap in cosine]
            present = moments.class_counts > 0
            totals = moments.class_totals[present][:, late].transpose(0, 1)
        return Measures(
            global_distance(moments),
            class_distance(moments) if labelled else None,
            self.first_class_tap,
            neighbours,
            tuple(near),
            totals,
            tuple(cosine),
            self._known.probable,
            absent,
        )

    def _values(self, measures: Measures, choice: Choice, ranked: Tensor) -> Tensor:
        """Return the chosen terms of known examples, each without itself, `[example, term]`."""
        assert self.moments is not None
        # classes without examples are left out
        number = (self.moments.class_counts > 0).cumsum(0) - 1
        places = [measures.terms.index(term) for term in choice.weights]
        found = []
        for rows in ranked.split(STEP):
            examples = self._known.rows(rows)
            if self.trained:
                values = measures(examples.features, examples.probability)
            else:
                classes = None if measures.classes is None else number[examples.classes]
                values = measures(
                    examples.features, examples.probability, rows=rows, classes=classes
                )
            found.append(values[:, places])
        return torch.cat(found)


class KeptExamples:
    """Token summaries, probabilities and labels of examples that lie evenly in the data.

    Every first, second, fourth ... example is kept, by its position: batches do not matter.
    """

    def __init__(self) -> None:
        self._seen, self._stride = 0, 1
        self._columns: dict[str, list[Tensor]] = {}

    @property
    def count(self) -> int:
        """Number of kept examples."""
        return sum(map(len, self._columns.get("positions", ())))

    @property
    def positions(self) -> Tensor:
        """Positions of the kept examples in the data."""
        return torch.cat(self._columns["positions"])

    @property
    def labelled(self) -> bool:
        """Whether the examples have labels."""
        return "labels" in self._columns

    @property
    def probable(self) -> bool:
        """Whether the examples have probabilities."""
        return "probability" in self._columns

    @property
    def largest_probability(self) -> Tensor:
        """The largest probability that an example gives to each class, `[class]`."""
        return torch.cat(self._columns["probability"]).amax(0)

    def add_(self, summaries: Tensor, member_logits: Tensor | None, labels: Tensor | None) -> None:
        """Add a batch, in place; what one batch lacks is kept of none."""
        positions = torch.arange(self._seen, self._seen + len(summaries))
        self._seen += len(summaries)
        columns = {"positions": positions, "summaries": summaries}
        if member_logits is not None:
            columns["probability"] = mean_probability(member_logits.detach()).cpu()
        if labels is not None:
            columns["labels"] = labels.cpu().long()
        kept = positions % self._stride == 0
        for name in [*(self._columns or columns)]:
            if name not in columns:
                del self._columns[name]
                continue
            column = columns[name] if bool(kept.all()) else columns[name][kept]
            self._columns.setdefault(name, []).append(column)
        if self.count <= max(2048, min(8192, KEPT // summaries[0].numel())):
            return
        self._stride *= 2
        rows = self.positions % self._stride == 0
        self._columns = {name: [torch.cat(c)[rows]] for name, c in self._columns.items()}

    def rows(self, rows: Tensor) -> Examples:
        """Return some of the kept examples."""
        columns = {name: torch.cat(self._columns[name])[rows] for name in self._columns}
        features = unit(columns["summaries"].double())
        return Examples(features, columns.get("probability"), columns.get("labels"))

    def halves(self) -> tuple[Tensor, Tensor]:
        """Split the kept examples in two by every other one, class by class."""
        order = torch.arange(self.count)
        if self.labelled:
            order = torch.cat(self._columns["labels"]).argsort(stable=True)
        return order[::2].sort().values, order[1::2].sort().values


def _joined(parts: Sequence[Any]) -> Any:
    """Join the parts of a column."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part.cpu() for part in parts])
    return [value for part in parts for value in part]


def _names(
    columns: Mapping[str, Any],
    positions: Tensor,
    decode: Callable[[Tensor], Sequence[str]] | None,
) -> tuple[str, ...]:
    """Return the names of the examples at some positions; none where there are none."""
    if "names" in columns:
        given = columns["names"]
        return names_by_position([given[place] for place in positions.tolist()], positions)
    if "heads" in columns and decode is not None:
        return names_by_position(decode(columns["heads"][positions]), positions)
    return ()


def _finite(summaries: Tensor, kind: str) -> Tensor:
    """Return summaries on the CPU in float32, or refuse them."""
    if not bool(summaries.isfinite().all()):
        raise DataError(
            f"Hidden states of the {kind} data hold NaN or infinity: check the inputs and the "
            "model's precision."
        )
    return summaries.float().cpu()
