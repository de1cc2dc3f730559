"""What each head does: its effect on accuracy, calibration and OOD detection, under several edits.

A head's output A_h is replaced by zero, by its mean over the data, or by its output on another
example (activation patching); each head alone, or under the mask that a search fixed below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._records import read_record, to_record
from ..data.model_runs import expect_batches
from ..data.progress import Progress
from ..heads.head_mask import HeadMask, HeadScores
from ..hosts import HostModel, host_model
from ..registry import check_name
from ..search.candidate_streams import Call, Replacement
from ..search.headmap import Circuit
from ..search.objectives import Objective, as_objective, effect
from ..search.search_data import search_sets
from ..search.trunk_cache import CACHE_BYTES, Outputs, Prefix

Edit = Literal["zero", "mean", "patch"]
EDITS = ("zero", "mean", "patch")


@dataclass(frozen=True)
class HeadMap:
    """Effects of heads, one table per metric; positive means that the metric gets worse.

    Attributes:
        effects: By metric (`error`, `nll`, `ece`, `ood-auroc`), with standard errors.
        edit: What replaced a head's output.
        below: The mask under which lower layers ran, or None for the whole model.
    """

    effects: dict[str, HeadScores]
    edit: str
    below: HeadMask | None = None

    def __getitem__(self, figure: str) -> HeadScores:
        return self.effects[figure]

    def significant(self, figure: str, *, errors: float = 2.0) -> HeadMask:
        """Return the heads whose effect is clearly different from zero, in standard errors."""
        table = self.effects[figure]
        assert table.standard_error is not None
        return HeadMask(
            [
                row.abs() > errors * spread
                for row, spread in zip(table, table.standard_error, strict=True)
            ]
        )

    def __str__(self) -> str:
        context = "each head alone" if self.below is None else "under a mask below"
        lines = [f"HeadMap by {self.edit}-ablation, {context}; positive = the head helps"]
        for name, table in self.effects.items():
            clear = self.significant(name).total_kept
            assert table.standard_error is not None
            by = table.standard_error
            seen = [(i, h) for i, h in table.ranking() if table[i].any() or by[i].any()]
            top = ", ".join(
                f"{layer}.{head} {float(table[layer][head]):+.4f} ± {float(by[layer][head]):.4f}"
                for layer, head in seen[:3]
            )
            lines.append(f"  {name:<10} {clear} of {sum(table.shape)} clear of noise; most: {top}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return plain JSON."""
        return to_record(
            "HeadMap",
            {
                "edit": self.edit,
                "below": None if self.below is None else json.loads(self.below.to_json()),
                "effects": {k: json.loads(v.to_json()) for k, v in self.effects.items()},
            },
        )

    @classmethod
    def from_json(cls, text: str) -> HeadMap:
        """Read what `to_json` wrote."""
        data = read_record("HeadMap", text)
        below = data["below"]
        return cls(
            {k: HeadScores.from_json(json.dumps(v)) for k, v in data["effects"].items()},
            data["edit"],
            None if below is None else HeadMask.from_json(json.dumps(below)),
        )


def head_map(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    edit: Edit = "zero",
    below: HeadMask | Circuit | None = None,
    score: str = "msp",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> HeadMap:
    """Measure each head's effect on accuracy, NLL, calibration and OOD detection.

    Example:
        >>> head_map(model, id=validation, ood="auto", edit="mean")["ece"]

    Args:
        model: A host model; it is not changed.
        id: Labelled in-distribution data.
        ood: Outliers (data, dict by family, `"auto"` for proxies); None omits OOD detection.
        edit: `"zero"`, `"mean"` (the head's mean output over `id`, by position if all inputs have
            the same length) or `"patch"` (its output on another example of the batch, seeded).
        below: Condition on a mask: layers below the one that is edited keep only these heads.
        score: The uncertainty that ranks outliers.
        layers: Layers to measure; effects elsewhere are 0.
        seed: Seed of the donors of `"patch"`.
        cache_bytes: Memory for hidden states.
        progress: Show a bar on a terminal.
    """
    check_name("edit", edit, EDITS)
    host = host_model(model)
    sets = search_sets(model, id, ood=ood, shift=None, needs=("id",))
    goals = [_error(), as_objective("id-loss"), as_objective("ece")]
    if len(sets) > 1:
        goals.append(as_objective("ood-auroc", score))
    mask = below.mask if isinstance(below, Circuit) else below
    rows = list(HeadMask.full(host) if mask is None else mask)
    chosen = set(range(len(host)) if layers is None else layers)
    prefix = Prefix(host, sets, cache_bytes=cache_bytes)
    names = ["error", "nll", "ece", "ood-auroc"][: len(goals)]
    effects: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in names}
    depth = len(host)
    work = sum((host.head_counts[i] + 1) * (depth - i) for i in chosen) * prefix.batches
    expect_batches(host.model, sets["id"], work / depth, "head map", enabled=progress)
    with Progress(f"head map, {edit}", work, enabled=progress, unit="block runs") as bar:
        for layer in range(depth):
            heads = host.head_counts[layer]
            if layer in chosen:
                outputs = _edited(prefix, heads, edit, seed, bar.update)
                base = outputs.candidate(0)
                for name, goal in zip(names, goals, strict=True):
                    pairs = [effect(goal, outputs.candidate(h + 1), base) for h in range(heads)]
                    effects[name].append(([p[0] for p in pairs], [p[1] for p in pairs]))
            else:
                for name in names:
                    effects[name].append(([0.0] * heads, [0.0] * heads))
            if layer < depth - 1:
                prefix.advance(rows[layer])
    tables = {
        name: HeadScores([v for v, _ in table], name=name, standard_error=[e for _, e in table])
        for name, table in effects.items()
    }
    return HeadMap(tables, edit, mask)


def _edited(prefix: Prefix, heads: int, edit: str, seed: int, tick: Any) -> Outputs:
    """Return the logits without an edit (candidate 0) and with each head of a layer edited."""
    full = HeadMask.full(prefix.host)
    masks = [full] + [
        full.with_layer(prefix.layer, torch.arange(heads) != head) for head in range(heads)
    ]
    return prefix.logits(masks, replacement=_replacement(prefix, edit, seed), tick=tick)


def _replacement(
    prefix: Prefix, edit: str, seed: int
) -> Callable[[str, int, Call], Replacement] | None:
    if edit == "zero":
        return None
    if edit == "mean":
        means = _mean_heads(prefix)
        return lambda name, index, call: Replacement(means=means)

    def donors(name: str, index: int, call: Call) -> Replacement:
        generator = torch.Generator().manual_seed(seed + 7919 * index)
        order = torch.randperm(call.batch, generator=generator)
        taken = torch.empty_like(order)
        taken[order] = order.roll(1)  # no example is its own donor, if there are two or more
        return Replacement(donors=taken)

    return donors


@torch.no_grad()
def _mean_heads(prefix: Prefix) -> Tensor:
    """Return the mean head outputs over the ID data: [tokens or 1, heads, head width]."""

    def sum_of(index: int, x: Tensor, call: Call) -> dict[str, Tensor]:
        heads = prefix.engine.heads(prefix.layer, x, call)  # [batch, tokens, heads, width]
        return {"sum": heads.sum(0), "count": torch.tensor(call.batch)}

    sums = list(prefix.over("id", sum_of))
    same = len({len(one["sum"]) for one in sums}) == 1
    total, count = None, 0
    for one in sums:
        value = one["sum"] if same else one["sum"].mean(0, keepdim=True)
        total = value if total is None else total + value
        count += int(one["count"])
    assert total is not None
    return total / count


def _error() -> Objective:
    """The share of wrong predictions."""

    def parts(outputs: Outputs) -> dict[str, Tensor]:
        predicted = outputs.logits["id"].softmax(-1).mean(1).argmax(-1)
        return {"id": (predicted != outputs.labels["id"]).double()}

    return Objective("error", lambda o: float(parts(o)["id"].mean()), parts)


def overlaps(circuits: Mapping[str, HeadMask | Circuit]) -> dict[tuple[str, str], float]:
    """Return the Jaccard index of every pair of circuits' heads."""
    masks = {name: c.mask if isinstance(c, Circuit) else c for name, c in circuits.items()}
    names = list(masks)
    return {(a, b): masks[a].overlap(masks[b]) for i, a in enumerate(names) for b in names[i + 1 :]}
