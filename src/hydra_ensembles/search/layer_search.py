"""The layers of a HeadMap search, bottom to top: passes, harms, what is fixed below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.model_runs import expect_batches
from ..data.progress import Progress
from ..errors import DataError
from ..heads.head_mask import HeadMask, HeadScores
from ..hosts import HostModel
from .objectives import Objective, effect
from .search_state import SearchState
from .trunk_cache import Outputs, Prefix


class LayerSearch:
    """Scores the heads of one layer after another above a cached prefix."""

    def __init__(
        self,
        host: HostModel,
        sets: Mapping[str, Any],
        goals: list[Objective],
        condition: str,
        counts: Sequence[int],
        layers: list[int],
        cache_bytes: int,
        baselines: bool,
    ) -> None:
        self.host, self.sets, self.goals = host, sets, goals
        self.condition, self.counts, self.layers = condition, counts, layers
        self.cache_bytes, self.baselines = cache_bytes, baselines

    def run(self, state: SearchState, progress: bool) -> list[dict[str, Any]]:
        """Search the layers that are not done yet."""
        depth = len(self.host)
        if len(state.steps) == depth:
            return state.steps
        labelled = [name for name in self.sets if name in ("id", "shift")]
        prefix = Prefix(self.host, self.sets, cache_bytes=self.cache_bytes, labelled=labelled)
        rows = [self._below(step, layer) for layer, step in enumerate(state.steps)]
        base = self._resume(prefix, rows)
        remaining = [layer for layer in self.layers if layer >= prefix.layer]
        work = sum((self.host.head_counts[i] + self.baselines) * (depth - i) for i in remaining)
        work *= prefix.batches
        expect_batches(
            self.host.model, self.sets["id"], work / depth, "searching", enabled=progress
        )
        with Progress("circuit", work, enabled=progress, unit="block runs") as bar:
            while True:
                runs = self._pass(prefix, base, bar.update)
                step = self._step(prefix.layer, runs)
                state.add(step)
                if prefix.layer == depth - 1:
                    return state.steps
                row = self._below(step, prefix.layer)
                place = _single_off(row)
                base = None if place is None else runs[place]
                prefix.advance(row)

    def _resume(self, prefix: Prefix, rows: Sequence[Tensor]) -> Outputs | None:
        """Advance to where a search stopped; repeat the pass that gave its next baseline.

        The pass has the same shape, so that the baseline has the same bits.
        """
        source = self._source(rows) if self.baselines else None
        base = None
        for layer, row in enumerate(rows):
            if source is not None and source[0] == layer:
                empty = None if self._source(rows[:layer]) is None else Outputs({}, {})
                base = self._pass(prefix, empty, lambda _: None)[source[1]]
            prefix.advance(row)
        return base

    def _source(self, rows: Sequence[Tensor]) -> tuple[int, int] | None:
        """Return the layer and candidate whose pass ran the baseline above `rows`; None for none.

        Passes run a layer as it is, and with one head off. If at most one head is off below the
        next layer, its baseline is known and need not be run.
        """
        source: tuple[int, int] | None = None
        for layer, row in enumerate(rows):
            place = _single_off(row)
            if place != 0:
                source = None if place is None else (layer, place)
            elif source is None and layer in self.layers:
                source = (layer, 0)
        return source

    def _below(self, step: Mapping[str, Any], layer: int) -> Tensor:
        """Return the gates of a finished layer while later ones are scored."""
        selected = torch.tensor(step["selected"], dtype=torch.bool)
        if self.condition == "none" or layer not in self.layers:
            return torch.ones_like(selected)
        return ~selected if self.condition == "knockout" else selected

    def _pass(self, prefix: Prefix, base: Outputs | None, tick: Any) -> list[Any]:
        """Run a layer as it is, unless that is known, and with each single head off."""
        layer = prefix.layer
        if layer not in self.layers:
            return [base]
        if not self.baselines:
            base = Outputs({}, {})  # never read
        heads = self.host.head_counts[layer]
        full = HeadMask.full(self.host)
        masks = [full.with_layer(layer, torch.arange(heads) != head) for head in range(heads)]
        if base is not None:
            outputs = prefix.logits(masks, tick=tick)
            return [base, *(outputs.candidate(head) for head in range(heads))]
        outputs = prefix.logits([full, *masks], tick=tick)
        return [outputs.candidate(place) for place in range(heads + 1)]

    def _step(self, layer: int, runs: Sequence[Outputs]) -> dict[str, Any]:
        """Rank the heads of a layer by their harm."""
        if layer not in self.layers:
            heads = self.host.head_counts[layer]
            return {
                "selected": [True] * heads,
                "effect": [0.0] * heads,
                "standard_error": [0.0] * heads,
                "baseline": 0.0,
            }
        if not self.baselines:
            # the objective without each head is its harm, up to a constant of the layer
            values = [_finite(goal, [goal.value(run) for run in runs[1:]]) for goal in self.goals]
            harms = values[0] if len(values) == 1 else average_harm(values)
            return {"selected": self._selected(layer, harms)}
        tables, spreads = [], []
        for goal in self.goals:
            pairs = [effect(goal, run, runs[0]) for run in runs[1:]]
            tables.append(_finite(goal, [harm for harm, _ in pairs]))
            spreads.append(torch.tensor([error for _, error in pairs], dtype=torch.float64))
        harms, errors = tables[0], spreads[0]
        if len(self.goals) > 1:
            harms, errors = average_harm(tables), average_error(tables, spreads)
        return {
            "selected": self._selected(layer, harms),
            "effect": harms.tolist(),
            "standard_error": errors.tolist(),
            "baseline": sum(goal.value(runs[0]) for goal in self.goals),
        }

    def _selected(self, layer: int, harms: Tensor) -> list[bool]:
        kept: list[bool] = HeadScores([harms]).top_k([self.counts[layer]])[0].tolist()
        return kept


def _finite(goal: Objective, values: Sequence[float]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float64)
    if not bool(table.isfinite().all()):
        raise DataError(f"The objective {goal.name!r} gave {values}: not finite.")
    return table


def _single_off(row: Tensor) -> int | None:
    """Return which run of a layer's pass has these heads on: 0 for all, 1 + h without head h."""
    off = (~row).nonzero().flatten().tolist()
    return None if len(off) > 1 else 1 + off[0] if off else 0


def average_harm(tables: Sequence[Tensor]) -> Tensor:
    """Return the mean over objectives of a layer's z-scored harms, [heads]."""
    return torch.stack([(t - t.mean()) / _spread(t) for t in tables]).mean(0)


def average_error(tables: Sequence[Tensor], errors: Sequence[Tensor]) -> Tensor:
    """Return the standard error of `average_harm`, as if objectives were independent."""
    scaled = [(e / _spread(t)) ** 2 for t, e in zip(tables, errors, strict=True)]
    return torch.stack(scaled).sum(0).sqrt() / len(tables)


def _spread(table: Tensor) -> Tensor:
    spread = table.std(correction=0)
    return spread if spread > 0 else torch.ones_like(spread)
