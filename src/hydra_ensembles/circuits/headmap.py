"""HeadMap: layer-conditioned search for the heads that carry an objective (Wang et al., 2025).

From the bottom layer to the top, each head is zeroed by itself (with what the search has fixed
below), its harm is how much the objective rises, and the layer's top-k heads by harm join the
circuit. The prefix below a layer is fixed, so its hidden states are cached (`prefix.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..budget import Budget
from ..data.batches import without_labels
from ..data.splits import fingerprint
from ..errors import DataError, MaskError
from ..masks import HeadMask, HeadScores, Keep, keep_counts
from ..models import HostModel, host_model
from ..uncertainty import Score
from .objectives import Objective, as_objective, average_of, effect
from .prefix import CACHE_BYTES, Outputs, Prefix
from .sets import search_sets
from .state import SearchState, model_fingerprint
from .ticking import ticker

Condition = Literal["knockout", "none", "keep"]
CONDITIONS = ("knockout", "none", "keep")


@dataclass(frozen=True)
class Circuit:
    """What a search found.

    Attributes:
        mask: The circuit: heads to keep.
        effects: Each head's harm, with its standard error over examples.
        baseline: The objective before any head of the layer is zeroed, by layer.
        objective, condition: What was searched.
        settings: Everything that the result depends on.
    """

    mask: HeadMask
    effects: HeadScores
    baseline: tuple[float, ...]
    objective: str
    condition: str
    settings: dict[str, Any] = field(default_factory=dict)

    def margins(self) -> list[float | None]:
        """Return, by layer, how many standard errors part the last head in from the first out."""
        found: list[float | None] = []
        assert self.effects.standard_error is not None
        for mask, row, error in zip(
            self.mask, self.effects, self.effects.standard_error, strict=True
        ):
            if bool(mask.all()) or not bool(mask.any()):
                found.append(None)
                continue
            last_in = torch.where(mask, row, torch.inf).argmin()
            first_out = torch.where(mask, -torch.inf, row).argmax()
            spread = float((error[last_in] ** 2 + error[first_out] ** 2).sqrt())
            gap = float(row[last_in] - row[first_out])
            found.append(gap / spread if spread else (float("inf") if gap else 0.0))
        return found

    def __str__(self) -> str:
        lines = [f"Circuit for {self.objective} ({self.condition}): {self.mask.total_kept} heads"]
        assert self.effects.standard_error is not None
        for layer, (mask, row, error, margin) in enumerate(
            zip(self.mask, self.effects, self.effects.standard_error, self.margins(), strict=True)
        ):
            heads = "  ".join(
                f"{'■' if kept else '·'} {value:+.4f} ± {spread:.4f}"
                for kept, value, spread in zip(
                    mask.tolist(), row.tolist(), error.tolist(), strict=True
                )
            )
            noise = "  (within noise)" if margin is not None and margin < 2 else ""
            if layer not in self.settings.get("layers", range(len(self.mask))):
                heads, noise = "  ".join("■" for _ in mask), "  (not searched)"
            lines.append(f"  {layer:>2}  {heads}{noise}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return plain JSON."""
        return json.dumps(
            {
                "kind": "Circuit",
                "mask": json.loads(self.mask.to_json()),
                "effects": json.loads(self.effects.to_json()),
                "baseline": list(self.baseline),
                "objective": self.objective,
                "condition": self.condition,
                "settings": self.settings,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Circuit:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        return cls(
            HeadMask.from_json(json.dumps(data["mask"])),
            HeadScores.from_json(json.dumps(data["effects"])),
            tuple(data["baseline"]),
            data["objective"],
            data["condition"],
            data["settings"],
        )


def find_circuit(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    shift: Any = None,
    objective: Any = "id-loss",
    keep: Keep | None = None,
    max_cost: float | None = None,
    condition: Condition = "knockout",
    layers: Sequence[int] | None = None,
    score: str | Score = "msp",
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> HeadMask:
    """Find the heads that carry an objective. See `find_effects` for the arguments.

    Example:
        >>> mask = find_circuit(model, id=validation, ood=outliers, objective="ood-auroc", keep=0.5)
    """
    return find_effects(
        model,
        id=id,
        ood=ood,
        shift=shift,
        objective=objective,
        keep=keep,
        max_cost=max_cost,
        condition=condition,
        layers=layers,
        score=score,
        folder=folder,
        cache_bytes=cache_bytes,
        progress=progress,
    ).mask


def find_effects(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    shift: Any = None,
    objective: Any = "id-loss",
    keep: Keep | None = None,
    max_cost: float | None = None,
    condition: Condition = "knockout",
    layers: Sequence[int] | None = None,
    score: str | Score = "msp",
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> Circuit:
    """Search a circuit and return each head's harm beside it.

    Args:
        model: A host model; left as it was.
        id: Labelled in-distribution data, any re-iterable of batches.
        ood: Outliers: data, a dict of data by family, or `"auto"` (proxies made of `id`); None
            means `"auto"` where the objective needs outliers.
        shift: Labelled in-distribution data under corruption; made of `id` where the objective
            needs it and None is given.
        objective: `id-loss`, `ood-auroc`, `ece`, `nll-shift`, `average`, an `Objective`, or a
            function of `Outputs` that is lower when better.
        keep: Heads of the circuit: a fraction of each layer, a number, or a list by layer; half by
            default.
        max_cost: In place of `keep`: as many heads as the model pruned to the circuit may cost, in
            counted multiply-adds relative to the plain one (`Budget.heads`).
        condition: What is fixed below a layer: `"knockout"` (the published search: heads already
            selected stay zeroed), `"keep"` (heads not selected are zeroed: the circuit as it will
            be used), `"none"` (nothing: each head alone).
        layers: Layers to search; the others keep all heads. All by default.
        score: The uncertainty by which `ood-auroc` ranks.
        folder: Where to keep the state, so that a stopped search goes on; None keeps none.
        cache_bytes: Memory for hidden states; beyond it they are recomputed.
        progress: Show a bar with the remaining time on a terminal.
    """
    if condition not in CONDITIONS:
        raise ValueError(f"Unknown condition {condition!r}: expected {', '.join(CONDITIONS)}.")
    host = host_model(model)
    goal = as_objective(objective, score)
    sets = search_sets(id, ood=ood, shift=shift, needs=goal.needs, average=goal.name == "average")
    kinds = sorted({name.split("/")[0] for name in sets})
    goals = average_of(score, kinds) if goal.name == "average" else [goal]
    chosen = list(range(len(host))) if layers is None else sorted(layers)
    counts = _counts(host, sets["id"], keep, max_cost, chosen)
    counts = tuple(
        k if i in chosen else n
        for i, (k, n) in enumerate(zip(counts, host.head_counts, strict=True))
    )
    settings = {
        "objective": goal.name,
        "condition": condition,
        "keep": list(counts),
        "layers": chosen,
        "score": score if isinstance(score, str) else getattr(score, "__name__", "score"),
        "model": model_fingerprint(host.model) if folder is not None else "",
        "data": _fingerprints(sets) if folder is not None else {},
    }
    state = SearchState(folder, settings)
    search = _Search(host, sets, goals, condition, counts, chosen, cache_bytes)
    layers_done = search.run(state, progress)
    errors = [step["standard_error"] for step in layers_done]
    return Circuit(
        HeadMask([step["selected"] for step in layers_done]),
        HeadScores([step["effect"] for step in layers_done], name=goal.name, standard_error=errors),
        tuple(step["baseline"] for step in layers_done),
        goal.name,
        condition,
        settings,
    )


def _counts(
    host: HostModel, data: Any, keep: Keep | None, max_cost: float | None, layers: Sequence[int]
) -> tuple[int, ...]:
    """Return how many heads each layer keeps, as asked or as a budget allows."""
    if max_cost is None:
        return keep_counts(0.5 if keep is None else keep, host.head_counts)
    if keep is not None:
        raise MaskError(
            f"keep={keep} and max_cost={max_cost} both say how many heads to keep: give one."
        )
    return Budget.of(host, next(iter(data)), max_cost).heads(layers)


def _fingerprints(sets: Mapping[str, Any]) -> dict[str, str]:
    """Hash every data set; outliers' labels mean nothing and are left out."""
    labelled = ("id", "shift")
    return {
        name: fingerprint(data if name in labelled else [without_labels(b) for b in data])
        for name, data in sets.items()
    }


class _Search:
    def __init__(
        self,
        host: HostModel,
        sets: Mapping[str, Any],
        goals: list[Objective],
        condition: str,
        counts: Sequence[int],
        layers: list[int],
        cache_bytes: int,
    ) -> None:
        self.host, self.sets, self.goals = host, sets, goals
        self.condition, self.counts, self.layers = condition, counts, layers
        self.cache_bytes = cache_bytes

    def run(self, state: SearchState, progress: bool) -> list[dict[str, Any]]:
        """Search the layers that are not done yet."""
        depth = len(self.host)
        if len(state.steps) == depth:
            return state.steps
        labelled = [name for name in self.sets if name in ("id", "shift")]
        prefix = Prefix(self.host, self.sets, cache_bytes=self.cache_bytes, labelled=labelled)
        rows = [self._below(step, layer) for layer, step in enumerate(state.steps)]
        base = self._climb(prefix, rows)
        remaining = [layer for layer in self.layers if layer >= prefix.layer]
        work = sum((self.host.head_counts[i] + 1) * (depth - i) for i in remaining)
        with ticker("circuit", work * prefix.batches, enabled=progress) as tick:
            while True:
                runs = self._pass(prefix, base, tick)
                step = self._step(prefix.layer, runs)
                state.add(step)
                if prefix.layer == depth - 1:
                    return state.steps
                row = self._below(step, prefix.layer)
                place = _known(row)
                base = None if place is None else runs[place]
                prefix.advance(row)

    def _climb(self, prefix: Prefix, rows: Sequence[Tensor]) -> Outputs | None:
        """Go up to where a search stopped; run again what its next baseline was taken from.

        The same pass in the same shape, so that the baseline has the same bits.
        """
        source = self._source(rows)
        base = None
        for layer, row in enumerate(rows):
            if source is not None and source[0] == layer:
                own = None if self._source(rows[:layer]) is None else Outputs({}, {})
                base = self._pass(prefix, own, lambda _: None)[source[1]]
            prefix.advance(row)
        return base

    def _source(self, rows: Sequence[Tensor]) -> tuple[int, int] | None:
        """Return the layer and candidate whose pass ran the baseline above `rows`; None for none.

        Passes run a layer as it is, and with one head off. Where no head, or one, is off below the
        next layer, its baseline is known: it need not be run again.
        """
        found: tuple[int, int] | None = None
        for layer, row in enumerate(rows):
            place = _known(row)
            if place != 0:
                found = None if place is None else (layer, place)
            elif found is None and layer in self.layers:
                found = (layer, 0)
        return found

    def _below(self, step: Mapping[str, Any], layer: int) -> Tensor:
        """Return the gates of a finished layer while later ones are scored."""
        selected = torch.tensor(step["selected"], dtype=torch.bool)
        if self.condition == "none" or layer not in self.layers:
            return torch.ones_like(selected)
        return ~selected if self.condition == "knockout" else selected

    def _pass(self, prefix: Prefix, base: Outputs | None, tick: Any) -> list[Any]:
        """Run a layer as it is, unless that is known, and with each head off by itself."""
        layer = prefix.layer
        if layer not in self.layers:
            return [base]
        heads = self.host.head_counts[layer]
        full = HeadMask.full(self.host)
        masks = [full.with_layer(layer, torch.arange(heads) != head) for head in range(heads)]
        if base is not None:
            found = prefix.logits(masks, tick=tick)
            return [base, *(found.candidate(head) for head in range(heads))]
        found = prefix.logits([full, *masks], tick=tick)
        return [found.candidate(place) for place in range(heads + 1)]

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
        harms, errors = self._effects(runs[0], runs[1:])
        kept = HeadScores([harms]).top_k([self.counts[layer]])
        return {
            "selected": kept[0].tolist(),
            "effect": harms.tolist(),
            "standard_error": errors.tolist(),
            "baseline": sum(goal.value(runs[0]) for goal in self.goals),
        }

    def _effects(self, base: Outputs, changed: Sequence[Outputs]) -> tuple[Tensor, Tensor]:
        tables, spreads = [], []
        for goal in self.goals:
            found = torch.tensor([effect(goal, c, base) for c in changed], dtype=torch.float64)
            if not bool(found[:, 0].isfinite().all()):
                raise DataError(
                    f"The objective {goal.name!r} gave {found[:, 0].tolist()}: not finite."
                )
            tables.append(found[:, 0])
            spreads.append(found[:, 1])
        if len(self.goals) == 1:
            return tables[0], spreads[0]
        return average_harm(tables), average_error(tables, spreads)


def _known(row: Tensor) -> int | None:
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
