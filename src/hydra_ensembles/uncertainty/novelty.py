"""Novelty: is this input like anything known? Distances and scores, joined as p-values.

    score(x)   = sum over terms of w_term * -log p_term(x)     Fisher's sum, taken as a score
    novelty(x) = share of known data with a lower score         in [0, 1]

The terms are distances at the taps (`distances.py`) and scores of the mean probability. Each
p-value is the term's rank among known examples, each of them held out. Taps repeat each other, so
each kind of terms has a weight, shared by its taps. The usual weights:

    trunk: distance to all known data             4
    trunk: distance to the nearest class          1   relative to that to all known data
    last block: distance to the nearest class     2   this block was trained to tell classes apart
    probability                                   1   generalized entropy (GEN, Liu et al., 2023)
    probability of absent classes                 2   only where there are any

An absent class is one that the host learned and the known data has no example of (with labels).
Without labels, or with two classes, there are no distances to classes, and the last block's
distance to all known data weighs 0.5; with two classes the probability weighs 0.5. The weights were
chosen on textures, MNIST, TREC, out-of-scope validation questions, scribbles, proxies, and classes
left out of the known data. Where leaving out classes of the known data shows that a longer sum
finds them clearly better here, terms join (`term_choice.py`). As terms depend on each other, the
score is not read off a chi-square table: it is ranked among the known examples' own scores.

P-values by rank among held-out known data, continued beyond the largest value seen.

    p(x) = (1 + #{held-out >= x}) / (n + 1)

is valid for exchangeable data (a conformal p-value), but everything beyond the largest held-out
value ties at 1 / (n + 1). There the tail goes on: -log p grows by log(1 + excess / scale), with the
mean excess over the 90 % quantile as the scale: a heavy (Pareto) tail, so that no single tap can
outvote all others. Ranks below the largest value are untouched, so the p-value stays valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from .distances import ClassDistance, GlobalDistance, Measures, Term, Whitening, unit
from .evidence import Evidence
from .known_ranges import KnownRanges
from .scores import mean_probability

TAIL = 0.1


def full_precision(features: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off, if it is on: bfloat16 would round features by more than they differ."""
    kind = features.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()  # an exported graph would keep a change that changes nothing
    return torch.autocast(kind, enabled=False)


@dataclass(frozen=True)
class Ranks:
    """Held-out values, sorted, and the scale of their upper tail.

    Attributes:
        values: Sorted in rising order, `[term, example]`.
        scale: Mean excess over the 90 % quantile, `[term]`.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, held_out: Tensor) -> Ranks:
        """Sort held-out values `[example, term]`."""
        values = held_out.T.sort(-1).values.contiguous()
        tail = values[:, -max(2, int(TAIL * values.shape[1])) :]
        scale = (tail - tail[:, :1]).mean(-1)
        spread = (values[:, -1] - values[:, 0]).clamp_min(1e-12)
        return cls(values, torch.where(scale > 0, scale, spread))

    def above(self, values: Tensor) -> Tensor:
        """Count the held-out values that are as large or larger, `[example, term]`."""
        return (self.values.shape[1] - count_below(self.values, values.T)).T

    def held_out_surprise(self, values: Tensor) -> Tensor:
        """Return -log p of the held-out values themselves, each ranked among the others."""
        count = self.values.shape[1]
        rank = self.above(values).to(values.dtype) / count  # it counts itself, in place of the 1
        others = self.values[:, -2] if count > 1 else self.values[:, -1]
        alone = values == self.values[:, -1]
        excess = torch.where(alone, values - others, 0.0) / self.scale
        return excess.log1p() - rank.log()

    def surprise(self, values: Tensor) -> Tensor:
        """Return -log p of values `[example, term]`, unbounded and rising."""
        rank = (1.0 + self.above(values)) / (self.values.shape[1] + 1)
        excess = (values - self.values[:, -1]).clamp_min(0) / self.scale
        return excess.log1p() - rank.log()


def count_below(rows: Tensor, values: Tensor) -> Tensor:
    """Count the entries of each sorted row below each value, `[row, value]`; NaN is above all.

    This is `torch.searchsorted`. ONNX has none, so a graph that is exported gets a binary search
    made of comparisons and gathers, as many as the row's length has bits.
    """
    exports = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if not exports:
        return torch.searchsorted(rows, values.contiguous())
    length = rows.shape[1]
    bits = length.bit_length()
    padded = torch.nn.functional.pad(rows, (0, 2**bits - 1 - length), value=torch.inf)
    below = torch.zeros_like(values, dtype=torch.long)
    for bit in reversed(range(bits)):
        step = 2**bit
        reached = padded.gather(1, below + (step - 1))
        below = torch.where(reached >= values, below, below + step)
    return below.clamp_max(length)


FORMAT_VERSION = 4
KINDS = {
    "distance": "{}",
    "class": "{}, nearest class",
    "relative": "{}, nearest class (relative)",
    "neighbour": "{}, nearest neighbour",
    "cosine": "{}, nearest class by cosine",
    "gen": "probability",
    "entropy": "entropy",
    "absent": "probability of classes without known examples",
}
"""Names of the kinds of terms."""


def usual_terms(
    taps: int,
    first_class_tap: int,
    *,
    classes: bool,
    uses_last_block: bool,
    probability: float = 1.0,
    absent: bool = False,
) -> dict[Term, float]:
    """Return the usual terms and their weights (see the top of this file).

    Args:
        taps: Number of taps.
        first_class_tap: The first tap that measures distances to classes.
        classes: Whether there are distances to classes.
        uses_last_block: Whether the last tap is the end of the last block.
        probability: Weight of the probability; 0 without one: not every task has classes.
        absent: Whether the host learned classes that no known example has.
    """
    ends: dict[Term, float] = {("gen", -1): probability} if probability else {}
    ends |= {("absent", -1): 2.0} if absent else {}
    late = range(first_class_tap, taps) if classes else range(0)
    if not uses_last_block:
        found = {("distance", tap): 4 / taps for tap in range(taps)}
        return {**found, **{("relative", tap): 2 / len(late) for tap in late}, **ends}
    end = taps - 1
    found = {("distance", tap): 4 / end for tap in range(end)}
    if not classes:
        return {**found, ("distance", end): 0.5, **ends}
    found |= {("relative", tap): 1 / (len(late) - 1) for tap in late[:-1]}
    return {**found, ("class", end): 2.0, **ends}


@dataclass(frozen=True, repr=False, eq=False)
class Novelty:
    """Statistics of known data, all that `predict` needs.

    Attributes:
        taps: Names of the taps, in their order.
        measures: What the terms are measured with.
        chosen: Kind and tap of every term.
        weights: Of the terms, `[term]`.
        ranks: Held-out terms.
        sums: Held-out scores, `[1, example]`.
        bank: Unit features of some known examples at the last tap, `[example, width]`.
        bank_positions: Their positions in the known data.
        names: Names of known examples by position (excerpts of texts, or files); empty where none
            was kept, as for examples that are not in the bank.
        ranges: Of plain facts of the known inputs, such as their length.
        examples: Known examples seen.
        trained: Training examples that gave means and covariances; 0 where known data gave them.
        hashes: Of all known inputs in order, int64 `[example]` (`input_hashes`); None where
            they were not kept.
        precision: In which the features were computed, such as `"bfloat16"` or `"float32 under
            autocast to bfloat16"`: in another precision they are other features.
        choice: How the terms were chosen, in a few words.
    """

    taps: tuple[str, ...]
    measures: Measures
    chosen: tuple[Term, ...]
    weights: Tensor
    ranks: Ranks
    sums: Ranks
    bank: Tensor
    bank_positions: Tensor
    names: tuple[str, ...] = ()
    ranges: KnownRanges = field(default_factory=KnownRanges)
    examples: int = 0
    trained: int = 0
    hashes: Tensor | None = None
    precision: str = "float32"
    choice: str = "the usual terms"

    @property
    def classes(self) -> ClassDistance | None:
        """Distances to classes; None without."""
        return self.measures.classes

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms of the score."""
        return tuple(KINDS[kind].format(self.taps[tap]) for kind, tap in self.chosen)

    @cached_property
    def _places(self) -> list[slice]:
        """Where the terms stand among all that is measured: runs of neighbours, in order."""
        every = self.measures.terms
        places = [every.index(term) for term in self.chosen]
        ends = [i + 1 for i, j in enumerate(places) if [j + 1] != places[i + 1 : i + 2]]
        return [slice(places[a], places[b - 1] + 1) for a, b in pairwise([0, *ends])]

    def total(self, surprise: Tensor) -> Tensor:
        """Return the score of surprises `[example, term]`, their weighted sum `[example]`."""
        return surprise @ self.weights.to(surprise.dtype)

    def surprise(
        self, summaries: Tensor, member_logits: Tensor | None, probability: Tensor | None = None
    ) -> Tensor:
        """Return -log p of every term, `[example, term]`.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            member_logits: Raw logits `[example, member, class]`, no temperature applied; None in
                tasks without classes.
            probability: Their mean probability `[example, class]`, when it is known already.
        """
        if probability is None and member_logits is not None:
            probability = mean_probability(member_logits)
        features = unit(summaries.to(self.measures.distance.mean.dtype))
        values = self.measures(features, probability)
        # slices, as a list of numbers would be copied to the device
        return self.ranks.surprise(torch.cat([values[:, run] for run in self._places], 1))

    def __call__(
        self, summaries: Tensor, member_logits: Tensor | None, probability: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return novelty in [0, 1] and the unbounded score, both `[example]` (see `surprise`)."""
        with full_precision(summaries):
            score = self.total(self.surprise(summaries, member_logits, probability))
            return self.rank(score), score

    def rank(self, score: Tensor) -> Tensor:
        """Return 1 - (1 + #{known >= score}) / (n + 1): above 1 - a for at most a share a."""
        above = self.sums.above(score[:, None])[:, 0]
        return 1 - (1.0 + above) / (self.sums.values.shape[1] + 1)

    def threshold(self, alarm: float) -> float:
        """Return the score above which novelty is above 1 - alarm; inf when no rank reaches it."""
        known = self.sums.values[0]
        most = math.ceil(alarm * (len(known) + 1) - 1 - 1e-9) - 1  # known data above a new input
        return float(known[len(known) - 1 - most]) if most >= 0 else math.inf

    def explain(
        self, summaries: Tensor, member_logits: Tensor | None, neighbours: int = 3
    ) -> Evidence:
        """Return which terms and which known examples speak for novelty."""
        with full_precision(summaries):
            surprise = self.surprise(summaries, member_logits)
            score = self.total(surprise)
            last = unit(summaries[:, -1].to(self.bank.dtype))
            similarity, order = (last @ self.bank.T).topk(min(neighbours, len(self.bank)))
        return Evidence(
            terms=self.terms,
            surprise=surprise.cpu(),
            neighbours=self.bank_positions[order].cpu(),
            similarity=similarity.cpu(),
            novelty=self.rank(score).cpu(),
            score=score.cpu(),
            names=self.names,
        )

    def without_names(self) -> Novelty:
        """Return the statistics without names of known examples, for data that is private."""
        return replace(self, names=())

    def single(self) -> Novelty:
        """Return the statistics in float32, as `predict` uses them and a folder holds them."""
        tensors = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.tensors().items()
        }
        return from_tensors(tensors, self.facts())

    def to(self, device: torch.device | str) -> Novelty:
        """Return the statistics on another device (itself when they are there)."""
        if self.bank.device == torch.device(device):
            return self
        return from_tensors({k: v.to(device) for k, v in self.tensors().items()}, self.facts())

    # --- plain data, for saving

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        measures, classes = self.measures, self.measures.classes
        found: dict[str, Tensor | None] = {
            "distance.mean": measures.distance.mean,
            "distance.whitening": measures.distance.whitening.matrix,
            "distance.level": measures.distance.whitening.level,
            "neighbours": measures.neighbours,
            "totals": measures.totals,
            "absent": measures.absent,
            "weights": self.weights,
            "ranks.values": self.ranks.values,
            "ranks.scale": self.ranks.scale,
            "sums.values": self.sums.values,
            "sums.scale": self.sums.scale,
            "bank": self.bank,
            "bank_positions": self.bank_positions,
            "hashes": self.hashes,
        }
        if classes is not None:
            found |= {
                "classes.centre": classes.centre,
                "classes.means": classes.means,
                "classes.whitening": classes.whitening.matrix,
                "classes.level": classes.whitening.level,
                "classes.counts": classes.counts,
            }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def facts(self) -> dict[str, Any]:
        """Return all that is not a tensor, as JSON can hold it."""
        return {
            "format_version": FORMAT_VERSION,
            "taps": list(self.taps),
            "first_class_tap": self.measures.first_class_tap,
            "neighbour_taps": list(self.measures.neighbour_taps),
            "cosine_taps": list(self.measures.cosine_taps),
            "terms": [list(term) for term in self.chosen],
            "choice": self.choice,
            "names": [],  # of every known example, in older folders
            "bank_names": [self.names[place] for place in self.bank_positions.tolist()]
            if self.names
            else [],
            "ranges": self.ranges.to_dict(),
            "examples": self.examples,
            "trained": self.trained,
            "precision": self.precision,
        }

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {len(self.classes.counts)} classes"
        trained = f", distances of {self.trained} training examples" if self.trained else ""
        precision = "" if self.precision == "float32" else f", in {self.precision}"
        return (
            f"{len(self.taps)} taps, fitted on {self.examples} known examples{trained}{classes}"
            f"{precision}; {self.choice}"
        )


def from_tensors(tensors: dict[str, Tensor], facts: dict[str, Any]) -> Novelty:
    """Read what `Novelty.tensors` and `Novelty.facts` returned."""
    version = facts.get("format_version", 0)
    if version != FORMAT_VERSION:
        raise FormatError(
            f"The novelty statistics have format {version}; this library reads {FORMAT_VERSION}. "
            "Use the version of hydra-ensembles that wrote them, or build the ensemble again."
        )
    try:
        classes = None
        if "classes.means" in tensors:
            classes = ClassDistance(
                tensors["classes.centre"],
                tensors["classes.means"],
                Whitening(tensors["classes.whitening"], tensors.get("classes.level")),
                tensors["classes.counts"],
            )
        distance = GlobalDistance(
            tensors["distance.mean"],
            Whitening(tensors["distance.whitening"], tensors.get("distance.level")),
            int(facts["trained"] or facts["examples"]),
        )
        return Novelty(
            taps=tuple(facts["taps"]),
            measures=Measures(
                distance,
                classes,
                int(facts["first_class_tap"]),
                tensors.get("neighbours"),
                tuple(facts["neighbour_taps"]),
                tensors.get("totals"),
                tuple(facts["cosine_taps"]),
                any(kind in ("gen", "entropy") for kind, _ in facts["terms"]),
                tensors.get("absent"),
            ),
            chosen=tuple((str(kind), int(tap)) for kind, tap in facts["terms"]),
            weights=tensors["weights"],
            ranks=Ranks(tensors["ranks.values"], tensors["ranks.scale"]),
            sums=Ranks(tensors["sums.values"], tensors["sums.scale"]),
            bank=tensors["bank"],
            bank_positions=tensors["bank_positions"],
            names=_names(facts, tensors["bank_positions"]),
            ranges=KnownRanges.from_dict(facts.get("ranges")),
            examples=int(facts["examples"]),
            trained=int(facts["trained"]),
            hashes=tensors.get("hashes"),
            precision=str(facts["precision"]),
            choice=str(facts["choice"]),
        )
    except KeyError as error:
        raise FormatError(
            f"The novelty statistics lack {error}. Save the ensemble again, or call fit_novelty_()."
        ) from None


def names_by_position(names: Sequence[str], positions: Tensor) -> tuple[str, ...]:
    """Return names of the examples at some positions as a list of all examples' names."""
    every = [""] * (int(positions.max()) + 1)
    for position, name in zip(positions.tolist(), names, strict=True):
        every[position] = name
    return tuple(every)


def _names(facts: dict[str, Any], positions: Tensor) -> tuple[str, ...]:
    """Read names of known examples: those in the bank, or all of them in older folders."""
    every, named = facts["names"], facts.get("bank_names", [])
    if not every and not named:
        return ()
    named = named or [every[p] if p < len(every) else "" for p in positions.tolist()]
    if len(named) != len(positions) or not all(isinstance(name, str) for name in named):
        raise FormatError(
            f"The novelty statistics have {len(named)} names for {len(positions)} known examples. "
            "Save the ensemble again, or call fit_novelty_()."
        )
    return names_by_position(named, positions)
