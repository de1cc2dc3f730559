"""Moments of tokens that are fitted and of those that judge, and the fit that the latter choose."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import processes
from .ridge import GRID, Fit, Linear, Moments, fit

HELD_OUT = 5
"""Every fifth example is held out: it judges fits."""
ROWS = 2048
"""Tokens that are kept before their moments are added."""
FROM_ZERO = (1e-8, 1e-6, *GRID)
"""Ridges of fits that shrink to 0. The small ones are for units with huge activations, as language
models have, which make the mean variance large."""
FROM_GIVEN = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridges of fits that shrink to the given weights."""


def judges_among(first: int, count: int, seed: int) -> Tensor:
    """Return which of so many examples judge [example]; `first` is the number of the first one."""
    return (torch.arange(first, first + count) + seed) % HELD_OUT == 0


@dataclass
class TokenSums:
    """Moments of the tokens that are fitted and of those that judge."""

    parts: list[Moments | None] = field(default_factory=lambda: [None, None])
    _kept: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add_(self, features: Tensor, targets: Tensor, weights: Tensor, judges: Tensor) -> None:
        """Add a batch: features, targets [batch, tokens, ...], weights [batch, tokens]."""
        judging = judges[:, None].expand_as(weights)
        used = weights > 0
        rows = (features, targets, weights, judging)
        self._kept.append(tuple(row[used.to(row.device)].cpu() for row in rows))
        if sum(len(part[0]) for part in self._kept) >= ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = [torch.cat(parts) for parts in zip(*self._kept, strict=True)]
        self._kept = []
        if not columns:
            return
        features, targets, weights, judging = columns
        for place, rows in enumerate((~judging, judging)):
            new, old = Moments.of(features[rows], targets[rows], weights[rows]), self.parts[place]
            self.parts[place] = new if old is None else old + new

    def together(self) -> list[Moments | None]:
        """Return the moments of what was added; None for those without rows."""
        self._flush()
        return [part if part is not None and part.rows else None for part in self.parts]

    def of_all_processes(self) -> list[Moments | None]:
        """Return the moments of what all processes added."""
        totals: list[Moments | None] = [None, None]
        for parts in processes.exchange(self.together()):
            for place, part in enumerate(parts):
                total = totals[place]
                totals[place] = part if total is None else total if part is None else total + part
        return totals


def best_fit(rows: Moments, held_out: Moments, given: Linear) -> Fit:
    """Fit a linear map; shrink it to 0 or to the given map, whichever is better on held-out rows.

    Where neither is better than the given map, that is kept.
    """
    plain = fit(rows, held_out, [given], ridges=FROM_ZERO)[0]
    if plain.few:  # it shrinks to the given map already
        return plain
    zero = Linear(
        torch.zeros_like(given.weight), None if given.bias is None else torch.zeros_like(given.bias)
    )
    rest = fit(_without(rows, given), _without(held_out, given), [zero], ridges=FROM_GIVEN)[0]
    error = rest.error * plain.given_error / (rest.given_error or 1.0)
    if rest.ridge is None or error >= plain.error:
        return plain
    bias = None
    if given.bias is not None and rest.linear.bias is not None:
        bias = given.bias + rest.linear.bias
    linear = Linear(given.weight + rest.linear.weight, bias)
    return Fit(linear, rest.ridge, error, plain.given_error, plain.few)


def _without(rows: Moments, given: Linear) -> Moments:
    """Return the moments of rows whose targets are what a map leaves of them."""
    w = given.weight
    moved = rows.uu @ w
    return Moments(
        rows.rows,
        rows.weight,
        rows.u,
        rows.y - rows.u @ w - (0.0 if given.bias is None else given.bias),
        rows.uu,
        rows.uy - moved,
        (rows.yy - 2 * (w * rows.uy).sum(0) + (w * moved).sum(0)).clamp_min(0),
    )
