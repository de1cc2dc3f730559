"""Why an input is novel: the terms that say so, the nearest known examples, and plain facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KNOWN = "this input is among the known examples; its novelty is biased low"
"""What is noted beside an input that novelty was fitted on."""


@dataclass(frozen=True, repr=False, eq=False)
class Evidence:
    """What speaks for novelty, per example.

    Attributes:
        terms: Names of the terms: taps, class distances, and the score of the probability.
        surprise: -log p of every term, `[example, term]`; `score` is its weighted sum.
        neighbours: Positions of the nearest known examples, nearest first, `[example, neighbour]`.
        similarity: Their cosine similarity at the last tap.
        names: Names of known examples by position; empty where none was kept.
        facts: Plain facts of each example that lie outside the range of the known ones, in words.
        known: Which examples are among the known ones, `[example]`; None if that is unknown.
        novelty, score: As in `Prediction`.
    """

    terms: tuple[str, ...]
    surprise: Tensor
    neighbours: Tensor
    similarity: Tensor
    novelty: Tensor
    score: Tensor
    names: tuple[str, ...] = ()
    facts: Sequence[tuple[str, ...]] = ()
    known: Tensor | None = None

    def __len__(self) -> int:
        return len(self.surprise)

    def strongest(self, example: int, count: int = 3) -> list[tuple[str, float]]:
        """Return the terms that speak loudest, with their p-values."""
        values, order = self.surprise[example].topk(min(count, len(self.terms)))
        pairs = zip(order.tolist(), values.tolist(), strict=True)
        return [(self.terms[term], float(torch.tensor(-value).exp())) for term, value in pairs]

    def nearest(self, example: int) -> list[tuple[int, str | None, float]]:
        """Return the position, the name and the similarity of the nearest known examples."""
        near = zip(
            self.neighbours[example].tolist(), self.similarity[example].tolist(), strict=True
        )
        named = dict(enumerate(self.names))
        return [(position, named.get(position) or None, close) for position, close in near]

    def note(self, example: int) -> str | None:
        """Return a sentence for an example that is among the known ones, else None."""
        return KNOWN if self.known is not None and self.known[example] else None

    def lines(self, example: int) -> list[str]:
        """Return the facts that lie outside the known ranges, and the note, for people."""
        note = self.note(example)
        return [*(self.facts[example] if self.facts else ()), *([note] if note else [])]

    def to_dict(self, example: int) -> dict[str, Any]:
        """Return what speaks for an example's novelty as plain data."""
        return {
            "terms": [{"term": term, "p": p} for term, p in self.strongest(example)],
            "nearest": [
                {"position": position, "name": name, "similarity": round(close, 4)}
                for position, name, close in self.nearest(example)
            ],
            "facts": list(self.facts[example]) if self.facts else [],
            "note": self.note(example),
        }

    def __repr__(self) -> str:
        return "\n".join(self._text(i) for i in range(len(self)))

    def _text(self, example: int) -> str:
        value, score = float(self.novelty[example]), float(self.score[example])
        loud = ", ".join(f"{term} (p = {p:.2g})" for term, p in self.strongest(example))
        lines = [
            f"example {example}: novelty {value:.3f} (score {score:.1f})",
            f"  speaks for it  {loud}",
        ]
        for number, (position, name, close) in enumerate(self.nearest(example)):
            shown = f"#{position}" if name is None else name
            lines.append(f"  {'' if number else 'nearest known':<13}  {shown} ({close:.2f})")
        for number, line in enumerate(self.lines(example)):
            lines.append(f"  {'' if number else 'facts':<13}  {line}")
        return "\n".join(lines)
