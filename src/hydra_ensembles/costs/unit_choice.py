"""Which heads and neurons to keep within a budget: the best score for each multiply-add first."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MaskError
from ..heads import HeadMask, UnitMask, UnitScores, prune_units_
from ..heads.head_mask import check_fits
from ..heads.unit_mask import NeuronMask, check_units_fit
from ..hosts.head_weights import linear_weight
from .budget import SLACK, Host, counter_of
from .formula import CostModel, cost


def choose_units(
    model: Host,
    scores: UnitScores,
    *,
    max_cost: float,
    batch: Any,
    uniform: bool = False,
    heads: bool = True,
    min_heads: int = 2,
    min_neurons: float = 0.1,
) -> UnitMask:
    """Choose the heads and neurons that a model keeps, so that it costs at most `max_cost`.

    Every layer keeps its best few. Then units of all layers are taken in the order of their score
    for each multiply-add, until the budget is full. With grouped queries heads go by whole groups,
    which score the sum of their heads. What cannot be removed stays and is paid for.

    Args:
        model: A host model.
        scores: What `score_units` returned for it.
        max_cost: Largest allowed ratio of multiply-adds to the model as it is, such as 0.5.
        batch: A batch in the host's form; only its shapes matter.
        uniform: Keep equal numbers of neurons in all layers, and equal numbers of heads.
        heads: Whether heads may go; otherwise all of them stay.
        min_heads: Heads that every layer keeps.
        min_neurons: Share of its neurons that every layer keeps.

    Raises:
        MaskError: The budget cannot be met; the message says what the least costs.

    Example:
        >>> mask = choose_units(model, score_units(model, data), max_cost=0.5, batch=batch)
        >>> prune_units_(model, mask)
    """
    counter = counter_of(model, batch)
    host = counter.host
    check_fits(scores.heads, host)
    check_units_fit(UnitMask(HeadMask.full(host), [row >= 0 for row in scores.neurons]), host)
    lots = _head_lots(counter, scores, min_heads) if heads else []
    lots += _neuron_lots(counter, scores, min_neurons)
    fixed = counter.plain - sum(lot.price * len(lot.scores) for lot in lots)
    choose = _equal_numbers if uniform else _best_first
    limit = max_cost * counter.plain
    while True:
        least = fixed + sum(lot.price * lot.least for lot in lots)
        kept = choose(lots, limit - fixed) if least <= limit else None
        if kept is None:
            raise MaskError(
                f"max_cost={max_cost} cannot be met by {host.name}: with {min_heads} heads and "
                f"{min_neurons:.0%} of the neurons of each layer it costs "
                f"{least / counter.plain:.3f} x. Allow more, or keep fewer of each layer."
            )
        mask = _as_mask(counter, lots, kept)
        if not counter.hosted or mask == UnitMask.full(host):
            return mask
        # the host's own blocks may not save as much as their parts say: count what is left
        pruned = prune_units_(copy.deepcopy(host.model), mask)
        ratio = cost(pruned, batch).relative_to(cost(host, batch)).multiply_adds
        if ratio <= max_cost + SLACK:
            return mask
        limit -= (ratio - max_cost) * counter.plain + 1


@dataclass(frozen=True)
class _Lot:
    """The units of one kind in one layer that may go.

    Attributes:
        kind: `"heads"` or `"neurons"`.
        layer: Number of the layer.
        scores: Of each unit, or of each group of heads.
        price: Multiply-adds of each.
        least: How many stay whatever the scores.
        size: Heads of a group; 1 for neurons.
    """

    kind: str
    layer: int
    scores: Tensor
    price: float
    least: int
    size: int = 1

    @property
    def order(self) -> Tensor:
        """The units from the best to the worst, ties by the lower index."""
        return torch.sort(self.scores, descending=True, stable=True).indices


def _head_lots(counter: CostModel, scores: UnitScores, least: int) -> list[_Lot]:
    if counter.host.why_not_prunable() is not None:
        return []
    lots = []
    for site, geometry, row in zip(counter.host.sites, counter.geometry, scores.heads, strict=True):
        group = max(1, site.num_heads // max(1, site.kv_heads))
        groups = site.num_heads // group
        if not groups:
            continue
        others = range(group, site.num_heads)
        price = geometry.plain(counter.outside) - geometry.plain(counter.outside, others)
        if price > 0:
            by_group = row.view(groups, group).sum(1)
            least_groups = min(groups, math.ceil(least / group))
            lots.append(_Lot("heads", site.layer, by_group, price, least_groups, group))
    return lots


def _neuron_lots(counter: CostModel, scores: UnitScores, share: float) -> list[_Lot]:
    lots = []
    host = counter.host
    if host.shares_layers:  # a neuron that goes in one layer would go in all
        return []
    for block, mlp, geometry, row in zip(
        host.blocks, host.mlps, counter.geometry, scores.neurons, strict=True
    ):
        if len(row) and not isinstance(mlp, str):
            linears = [block.module.get_submodule(path) for path in (*mlp.first, mlp.second)]
            weights = sum(linear_weight(linear).numel() for linear in linears)
            price = geometry.rows(counter.outside) * weights / mlp.neurons
            least = max(1, math.ceil(share * mlp.neurons))
            lots.append(_Lot("neurons", block.index, row, price, least))
    return lots


def _best_first(lots: Sequence[_Lot], room: float) -> list[Tensor]:
    """Return which units of each lot stay: the least, then the best for their price."""
    kept = [lot.order[: lot.least].tolist() for lot in lots]
    room -= sum(lot.price * lot.least for lot in lots)
    rest = [
        (-float(lot.scores[unit]) / lot.price, place, unit)
        for place, lot in enumerate(lots)
        for unit in lot.order[lot.least :].tolist()
    ]
    for _, place, unit in sorted(rest):
        if lots[place].price <= room + SLACK:
            room -= lots[place].price
            kept[place].append(unit)
    return [torch.tensor(units, dtype=torch.long) for units in kept]


def _equal_numbers(lots: Sequence[_Lot], room: float) -> list[Tensor] | None:
    """Return which units stay, as many in every layer: the numbers with the largest score."""
    by_kind = {kind: [lot for lot in lots if lot.kind == kind] for kind in ("heads", "neurons")}

    def numbers(kind: str) -> range:
        if not by_kind[kind]:
            return range(1)
        least = max(lot.least for lot in by_kind[kind])
        return range(least, min(len(lot.scores) for lot in by_kind[kind]) + 1)

    def sums(kind: str) -> Tensor:
        """Scores of the best n units of all layers together, by n."""
        most = numbers(kind).stop - 1
        rows = [lot.scores[lot.order][:most].cumsum(0) for lot in by_kind[kind]]
        total = torch.stack(rows).sum(0) if rows else torch.zeros(0, dtype=torch.float64)
        return torch.cat([total.new_zeros(1), total])

    prices = {kind: sum(lot.price for lot in by_kind[kind]) for kind in by_kind}
    best: tuple[float, int, int] | None = None
    of_heads, of_neurons = sums("heads"), sums("neurons")
    for groups in numbers("heads"):
        left = room - groups * prices["heads"]
        most = numbers("neurons").stop - 1
        if prices["neurons"]:
            most = min(most, math.floor((left + SLACK) / prices["neurons"]))
        if left >= -SLACK and most >= numbers("neurons").start:
            score = float(of_heads[groups] + of_neurons[most])
            best = max(best or (score, groups, most), (score, groups, most))
    if best is None:
        return None
    number = {"heads": best[1], "neurons": best[2]}
    return [lot.order[: number[lot.kind]] for lot in lots]


def _as_mask(counter: CostModel, lots: Sequence[_Lot], kept: Sequence[Tensor]) -> UnitMask:
    full = UnitMask.full(counter.host)
    rows = {"heads": [r.clone() for r in full.heads], "neurons": [r.clone() for r in full.neurons]}
    for lot, units in zip(lots, kept, strict=True):
        row = torch.zeros(len(lot.scores), dtype=torch.bool)
        row[units] = True
        rows[lot.kind][lot.layer] = row.repeat_interleave(lot.size)
    return UnitMask(HeadMask(rows["heads"]), NeuronMask(rows["neurons"]))
