"""Why an input is novel: the terms that say so and the nearest known examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Evidence:
    """What speaks for novelty, per example.

    Attributes:
        terms: Names of the terms: taps, class distances, and the score of the probability.
        surprise: -log p of every term, `[example, term]`; `score` is its weighted sum.
        neighbours: Positions of the nearest known examples, nearest first, `[example, neighbour]`.
        similarity: Their cosine similarity at the last tap.
        names: Names of known examples by position, when they were given.
        novelty, score: As in `Prediction`.
    """

    terms: tuple[str, ...]
    surprise: Tensor
    neighbours: Tensor
    similarity: Tensor
    novelty: Tensor
    score: Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.surprise)

    def strongest(self, example: int, count: int = 3) -> list[tuple[str, float]]:
        """Return the terms that speak loudest, with their p-values."""
        values, order = self.surprise[example].topk(min(count, len(self.terms)))
        pairs = zip(order.tolist(), values.tolist(), strict=True)
        return [(self.terms[term], float(torch.tensor(-value).exp())) for term, value in pairs]

    def __repr__(self) -> str:
        return "\n".join(self._line(i) for i in range(len(self)))

    def _line(self, example: int) -> str:
        value, score = float(self.novelty[example]), float(self.score[example])
        loud = ", ".join(f"{term} (p = {p:.2g})" for term, p in self.strongest(example))
        near = ", ".join(
            f"{self._name(int(position))} ({float(close):.2f})"
            for position, close in zip(
                self.neighbours[example], self.similarity[example], strict=True
            )
        )
        return (
            f"example {example}: novelty {value:.3f} (score {score:.1f})\n"
            f"  speaks for it  {loud}\n"
            f"  nearest known  {near}"
        )

    def _name(self, position: int) -> str:
        return self.names[position] if self.names else f"#{position}"
