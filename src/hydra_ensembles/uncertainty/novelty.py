"""Novelty: is this input like anything known? Distances and one score, joined as p-values.

    score(x)   = sum over terms of w_term * -log p_term(x)     Fisher's sum, taken as a score
    novelty(x) = share of known data with a lower score         in [0, 1]

The terms are the Mahalanobis distances at every tap (`distances.py`, fitted by `moments.py`) and
the generalized entropy of the mean probability (GEN, Liu et al., 2023). Each p-value is the term's
rank among known examples, each of them held out. Taps repeat each other, so each kind of terms has
a fixed weight, shared by its taps:

    trunk: distance to all known data             4
    trunk: distance to the nearest class          1   relative to that to all known data
    last block: distance to the nearest class     2   this block was trained to tell classes apart
    probability                                   1

Without labels, or with two classes, there are no distances to classes, and the last block's
distance to all known data weighs 0.5. The weights were chosen on textures, MNIST, TREC,
out-of-scope validation questions, scribbles, proxies, and classes left out of the known data. As
terms depend on each other, the sum is not read off a chi-square table: it is ranked among the known
examples' own sums.

P-values by rank among held-out known data, continued beyond the largest value seen.

    p(x) = (1 + #{held-out >= x}) / (n + 1)

is valid for exchangeable data (a conformal p-value), but everything beyond the largest held-out
value ties at 1 / (n + 1). There the tail goes on: -log p grows by log(1 + excess / scale), with the
mean excess over the 90 % quantile as the scale: a heavy (Pareto) tail, so that no single tap can
outvote all others. Ranks below the largest value are untouched, so the p-value stays valid.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from .distances import ClassDistance, GlobalDistance, Whitening, unit
from .evidence import Evidence
from .scores import gen, gen_of

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


FORMAT_VERSION = 3


def class_terms(nearest: Tensor, distance: Tensor, *, hears_end: bool) -> Tensor:
    """Return distances to the nearest class, in the trunk relative to those to all known data.

    Args:
        nearest: Distances to the nearest class, `[example, late tap]`.
        distance: Distances to all known data at these taps.
        hears_end: Whether the last tap is the end of the last block: it is not relative.
    """
    if not hears_end:
        return nearest - distance
    return torch.cat([nearest[:, :-1] - distance[:, :-1], nearest[:, -1:]], 1)


def term_weights(taps: int, class_taps: int, *, hears_end: bool) -> Tensor:
    """Return the weight of every term (see the top of this file), `[term]`.

    Args:
        taps: Number of taps.
        class_taps: Number of taps that measure distances to classes; 0 without labels.
        hears_end: Whether the last tap is the end of the last block.
    """
    if not hears_end:
        each = [4 / taps] * taps + [2 / max(class_taps, 1)] * class_taps
    elif not class_taps:
        each = [4 / (taps - 1)] * (taps - 1) + [0.5]
    else:
        late = class_taps - 1
        each = [4 / (taps - 1)] * (taps - 1) + [0.0] + [1 / max(late, 1)] * late + [2.0]
    return torch.tensor([*each, 1.0])


@dataclass(frozen=True, repr=False, eq=False)
class Novelty:
    """Statistics of known data, all that `predict` needs.

    Attributes:
        taps: Names of the taps, in their order.
        distance: To all known data.
        classes: To the nearest class, of the taps from `first_class_tap` on; None without.
        first_class_tap: See `classes`.
        hears_end: Whether the last tap is the end of the last block, which has a weight of its own.
        weights: Of the terms, `[term]`.
        ranks: Held-out terms.
        sums: Held-out scores, `[1, example]`.
        bank: Unit features of some known examples at the last tap, `[example, width]`.
        bank_positions: Their positions in the known data.
        names: Names of the known data by position (may be empty).
        examples: Known examples seen.
        trained: Training examples that gave means and covariances; 0 where known data gave them.
        hashes: Of all known inputs in order, int64 `[example]` (`data.input_hashes`); None where
            they were not kept.
        precision: In which the features were computed, such as `"bfloat16"` or `"float32 under
            autocast to bfloat16"`: in another precision they are other features.
    """

    taps: tuple[str, ...]
    distance: GlobalDistance
    classes: ClassDistance | None
    first_class_tap: int
    weights: Tensor
    ranks: Ranks
    sums: Ranks
    bank: Tensor
    bank_positions: Tensor
    names: tuple[str, ...] = ()
    examples: int = 0
    trained: int = 0
    hears_end: bool = False
    hashes: Tensor | None = None
    precision: str = "float32"

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms of the score."""
        named = self.taps[self.first_class_tap :] if self.classes is not None else ()
        return (*self.taps, *(f"{tap}, nearest class" for tap in named), "probability")

    def total(self, surprise: Tensor) -> Tensor:
        """Return the score of surprises `[example, term]`: their weighted sum, `[example]`."""
        return surprise @ self.weights.to(surprise.dtype)

    def surprise(
        self, summaries: Tensor, member_logits: Tensor, probability: Tensor | None = None
    ) -> Tensor:
        """Return -log p of every term, `[example, term]`.

        Args:
            summaries: Token summaries `[example, tap, width]`.
            member_logits: Raw logits `[example, member, class]`, no temperature applied.
            probability: Their mean probability `[example, class]`, when it is known already.
        """
        score = gen(member_logits) if probability is None else gen_of(probability)
        heard = summaries[:, : len(self.taps)]  # old statistics do not know the last block
        features = unit(heard.to(self.distance.mean.dtype))
        return self.ranks.surprise(self._terms(features, score))

    def _terms(self, features: Tensor, score: Tensor) -> Tensor:
        distance = self.distance(features)
        parts = [distance]
        if self.classes is not None:
            late = slice(self.first_class_tap, None)
            nearest = self.classes(features[:, late])
            parts.append(class_terms(nearest, distance[:, late], hears_end=self.hears_end))
        parts.append(score.to(distance.dtype)[:, None])
        return torch.cat(parts, 1)

    def __call__(
        self, summaries: Tensor, member_logits: Tensor, probability: Tensor | None = None
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

    def explain(self, summaries: Tensor, member_logits: Tensor, neighbours: int = 3) -> Evidence:
        """Return which terms and which known examples speak for novelty."""
        with full_precision(summaries):
            surprise = self.surprise(summaries, member_logits)
            score = self.total(surprise)
            last = unit(summaries[:, len(self.taps) - 1].to(self.bank.dtype))
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
        found = {
            "distance.mean": self.distance.mean,
            **_whitening_tensors("distance", self.distance.whitening),
            "weights": self.weights,
            "ranks.values": self.ranks.values,
            "ranks.scale": self.ranks.scale,
            "sums.values": self.sums.values,
            "sums.scale": self.sums.scale,
            "bank": self.bank,
            "bank_positions": self.bank_positions,
        }
        if self.hashes is not None:
            found["hashes"] = self.hashes
        if self.classes is not None:
            found |= {
                "classes.centre": self.classes.centre,
                "classes.means": self.classes.means,
                **_whitening_tensors("classes", self.classes.whitening),
                "classes.counts": self.classes.counts,
            }
        return found

    def facts(self) -> dict[str, Any]:
        """Return all that is not a tensor, as JSON can hold it."""
        return {
            "format_version": FORMAT_VERSION,
            "taps": list(self.taps),
            "first_class_tap": self.first_class_tap,
            "hears_end": self.hears_end,
            "names": list(self.names),
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
            f"{precision}"
        )


def _whitening_tensors(name: str, whitening: Whitening) -> dict[str, Tensor]:
    found = {f"{name}.whitening": whitening.matrix}
    return found if whitening.level is None else {**found, f"{name}.level": whitening.level}


def from_tensors(tensors: dict[str, Tensor], facts: dict[str, Any]) -> Novelty:
    """Read what `Novelty.tensors` and `Novelty.facts` returned."""
    version = facts.get("format_version", 0)
    if version != FORMAT_VERSION:
        age = "newer" if version > FORMAT_VERSION else "older"
        raise FormatError(
            f"The novelty statistics have format {version}, {age} than {FORMAT_VERSION} which this "
            "library reads. Use the version of hydra-ensembles that wrote them, or build the "
            "ensemble again."
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
        return Novelty(
            taps=tuple(facts["taps"]),
            distance=GlobalDistance(
                tensors["distance.mean"],
                Whitening(tensors["distance.whitening"], tensors.get("distance.level")),
                int(facts["trained"] or facts["examples"]),
            ),
            classes=classes,
            first_class_tap=int(facts["first_class_tap"]),
            weights=tensors["weights"],
            ranks=Ranks(tensors["ranks.values"], tensors["ranks.scale"]),
            sums=Ranks(tensors["sums.values"], tensors["sums.scale"]),
            bank=tensors["bank"],
            bank_positions=tensors["bank_positions"],
            names=tuple(facts["names"]),
            examples=int(facts["examples"]),
            trained=int(facts["trained"]),
            hears_end=bool(facts.get("hears_end", False)),
            hashes=tensors.get("hashes"),
            precision=str(facts.get("precision", "float32")),
        )
    except KeyError as error:
        raise FormatError(
            f"The novelty statistics lack {error}. Save the ensemble again, or call fit_novelty_()."
        ) from None
