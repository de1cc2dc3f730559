"""The budget: where members branch and how many heads they keep, within a bound on cost.

Costs are counted multiply-adds against the plain host model (`formula.CostModel`). Before heads
are known, a budget must hold for *any* heads that members may choose: at the branch, where they
share projections, the union of their heads is taken as large as it can be. `Budget` also counts the
members of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MaskError
from ..heads.head_mask import HeadMask, HeadScores, Keep, check_fits, keep_count, keep_counts
from ..heads.stream_plan import LayerPlan, Plan
from ..hosts import HostModel
from .formula import CostModel

Host = nn.Module | HostModel | CostModel
SLACK = 1e-9


@dataclass(frozen=True)
class Option:
    """One way to spend a budget.

    Attributes:
        branch_layer: First block in which members differ; blocks before it run once.
        keep_per_layer: Heads that every member keeps, by layer (all of them before the branch).
        cost: Counted multiply-adds relative to the plain host, whichever heads are chosen.
    """

    branch_layer: int
    keep_per_layer: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Budget:
    """A bound on counted multiply-adds relative to the plain host.

    Attributes:
        costs: Counts plans of one host on one shape of batch.
        max_cost: The bound; None for no bound.
    """

    costs: CostModel
    max_cost: float | None

    @classmethod
    def of(cls, model: Host, batch: Any, max_cost: float | None) -> Budget:
        """Make a host's budget for the shape of a batch."""
        return cls(counter_of(model, batch), max_cost)

    @property
    def limit(self) -> float:
        """The bound as a number."""
        return float("inf") if self.max_cost is None else self.max_cost

    def ratio(self, masks: Sequence[HeadMask]) -> float:
        """Return the counted cost of members."""
        return self.costs.ratio(list(masks))

    def allows(self, masks: Sequence[HeadMask]) -> bool:
        """Return whether members are within the bound."""
        return self.max_cost is None or self.ratio(masks) <= self.max_cost + SLACK

    def branch_layers(self, members: int) -> list[int]:
        """Return the layers, up to the last, in which members of a search may differ.

        Starts at the lowest layer from which two streams with a third of the heads fit: more
        members branch higher up. Without a bound, the upper half of the layers.
        """
        depth = len(self.costs.host)
        if self.max_cost is None:
            return list(range(depth // 2, depth))
        counts = keep_counts(1 / 3, self.costs.host.head_counts)
        first = _earliest(self.costs, counts, min(members, 2), self.max_cost)
        if first is None:
            raise _no_room(self.costs, depth - 1, counts, members, self.max_cost)
        return list(range(first, depth))

    def option(self, members: int, *, keep: Keep | None = None, at_most: float = 0.5) -> Option:
        """Choose where members branch and how many heads they keep, for any choice of heads.

        Args:
            members: Number of members M.
            keep: Heads per branched layer; the earliest branch at which they fit is then chosen.
                None chooses both (`fit_budget`).
            at_most: Largest share of a branched block's heads, if the budget chooses.
        """
        if keep is None:
            return fit_budget(
                self.costs, members=members, max_cost=self.limit, batch=None, at_most=at_most
            )
        heads = self.costs.host.head_counts
        counts = keep_counts(keep, heads)
        first = _earliest(self.costs, counts, members, self.limit)
        if first is None:
            raise _no_room(self.costs, len(heads) - 1, counts, members, self.limit)
        counts = (*heads[:first], *counts[first:])
        return Option(first, counts, option_cost(self.costs, first, counts, members))

    def heads(self, layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the number of heads that one pruned model may keep, by layer.

        As many as fit, the same number in each of `layers` (all by default), then one more where it
        fits, from the top; the other layers keep all heads.
        """
        depth = len(self.costs.host)
        chosen = range(depth) if layers is None else sorted(layers)
        option = fill(self.costs, chosen, 1, self.limit, 1.0)
        if option is None:
            counts = _counts(self.costs, chosen, 1)
            raise _no_room(self.costs, chosen[0], counts, 1, self.limit)
        return option.keep_per_layer


def branch_options(
    model: Host,
    *,
    members: int,
    max_cost: float,
    batch: Any,
    at_most: float = 0.5,
    untied: bool = False,
) -> list[Option]:
    """List, from the last block to the first, what the budget allows at each branch layer.

    Every branched block keeps the same number of heads, as many as fit; the rest of the budget then
    gives single blocks one more, from the top. Branch layers at which not even one head per block
    fits are left out.

    Args:
        model: The host model (or its `CostModel`, to avoid counting again).
        members: Number of members M.
        max_cost: Largest allowed ratio of multiply-adds to the plain host, such as 1.07.
        batch: A batch in the host's form; only its shapes matter.
        at_most: Largest share of a branched block's heads that a member keeps, even if the budget
            allows more: members that keep nearly all heads hardly differ.
        untied: Count trained members: no two share a head's projections.
    """
    counter = counter_of(model, batch)
    options = (
        fill(counter, _from(counter, layer), members, max_cost, at_most, untied=untied)
        for layer in reversed(range(len(counter.host)))
    )
    return [option for option in options if option is not None]


def fit_budget(
    model: Host,
    *,
    members: int,
    max_cost: float,
    batch: Any,
    branch_layer: int | None = None,
    at_most: float = 0.5,
    untied: bool = False,
) -> Option:
    """Choose one of `branch_options`: the earliest branch that leaves each member its share.

    Members that branch early differ more; a share is 1/M of a block's heads, so that together the
    members still keep them all. If no branch leaves as much, the last block is chosen.

    Raises:
        MaskError: Nothing fits; the message says what the cheapest ensemble costs.
    """
    counter = counter_of(model, batch)
    options = branch_options(
        counter, members=members, max_cost=max_cost, batch=batch, at_most=at_most, untied=untied
    )
    if branch_layer is not None:
        options = [option for option in options if option.branch_layer == branch_layer]
    if not options:
        layer = len(counter.host) - 1 if branch_layer is None else branch_layer
        raise _no_room(
            counter, layer, _counts(counter, _from(counter, layer), 1), members, max_cost
        )
    heads = counter.host.head_counts

    def has_share(option: Option) -> bool:
        return all(
            option.keep_per_layer[layer] >= keep_count(min(1.0 / members, at_most), heads[layer])
            for layer in range(option.branch_layer, len(heads))
        )

    fair = [option for option in options if has_share(option)]
    return fair[-1] if fair else options[0]


def budgeted_masks(
    model: Host,
    scores: HeadScores | Sequence[HeadScores],
    *,
    members: int = 3,
    max_cost: float = 1.07,
    batch: Any,
    branch_layer: int | None = None,
    at_most: float = 0.5,
    untied: bool = False,
) -> list[HeadMask]:
    """Choose members' heads by their scores, within the budget.

    Args:
        model: The host model.
        scores: One table per member, of which it keeps the highest; or one table for all, from
            which members take turns (see `deal`).
        members: Number of members M.
        max_cost: Largest allowed ratio of multiply-adds to the plain host.
        batch: A batch in the host's form; only its shapes matter.
        branch_layer: Where members branch; chosen by `fit_budget` if None.
        at_most: Largest share of a branched block's heads that a member keeps.
        untied: Count members that will be trained, each with its own heads.
    """
    tables = [scores] if isinstance(scores, HeadScores) else list(scores)
    if len(tables) not in (1, members):
        raise MaskError(
            f"{len(tables)} score tables for {members} members: give one each, or one for all."
        )
    counter = counter_of(model, batch)
    for table in tables:
        check_fits(table, counter.host)
    option = fit_budget(
        counter,
        members=members,
        max_cost=max_cost,
        batch=batch,
        branch_layer=branch_layer,
        at_most=at_most,
        untied=untied,
    )
    return masks_for(option, scores, members=members)


def masks_for(
    option: Option, scores: HeadScores | Sequence[HeadScores], *, members: int
) -> list[HeadMask]:
    """Choose the heads of an option by one score table for all members, or one per member."""
    tables = [scores] if isinstance(scores, HeadScores) else list(scores)
    if len(tables) == 1 and members > 1:
        return deal(tables[0], option.keep_per_layer, members=members)
    return [table.top_k(list(option.keep_per_layer)) for table in tables]


def deal(scores: HeadScores, keep: Sequence[int], *, members: int) -> list[HeadMask]:
    """Let members take turns in picking heads from one score table, layer by layer.

    In its turn, a member takes the best head that it lacks, among those that the fewest members
    have. Members are thus disjoint while heads last, and every member gets good heads.
    """
    rows: list[list[Tensor]] = [[] for _ in range(members)]
    for row, count in zip(scores, keep, strict=True):
        order = torch.sort(row, descending=True, stable=True).indices.tolist()
        holders = [0] * len(row)
        kept = [torch.zeros(len(row), dtype=torch.bool) for _ in range(members)]
        for _ in range(count):
            for row_of_member in kept:
                head = min((h for h in order if not row_of_member[h]), key=holders.__getitem__)
                row_of_member[head] = True
                holders[head] += 1
        for member, row_of_member in enumerate(kept):
            rows[member].append(row_of_member)
    return [HeadMask(table) for table in rows]


def option_cost(
    model: CostModel,
    branch_layer: int,
    keep_per_layer: Sequence[int],
    members: int,
    *,
    untied: bool = False,
) -> float:
    """Count M members that branch at a layer, for the costliest choice of that many heads."""
    shape = model.host.head_counts
    everyone = tuple(range(members))

    def heads(layer: int) -> tuple[tuple[int, ...], ...]:
        # staggered, so that the union is as large as possible; untied members share no head
        count = keep_per_layer[layer]
        of = members * count if untied else shape[layer]
        return tuple(tuple(sorted((m * count + i) % of for i in range(count))) for m in everyone)

    layers = [
        LayerPlan(
            layer=layer,
            parents=(0,) * members if layer == branch_layer else everyone,
            members=everyone,
            heads=heads(layer),
            shared=True,
            readout_only=model.reads_few_tokens and layer == len(shape) - 1,
        )
        for layer in range(branch_layer, len(shape))
    ]
    trunk = tuple(tuple(range(shape[layer])) for layer in range(branch_layer))
    return model.ratio_of(Plan((), branch_layer, trunk, tuple(layers), everyone, everyone))


def counter_of(model: Host, batch: Any) -> CostModel:
    """Return the host's `CostModel`, built for the batch's shape if needed."""
    return model if isinstance(model, CostModel) else CostModel(model, batch)


def _from(counter: CostModel, layer: int) -> range:
    """Return the layers from `layer` on."""
    return range(layer, len(counter.host))


def _counts(counter: CostModel, layers: Sequence[int], keep: int) -> tuple[int, ...]:
    heads = counter.host.head_counts
    return tuple(min(keep, n) if i in layers else n for i, n in enumerate(heads))


def _earliest(
    counter: CostModel, counts: Sequence[int], members: int, max_cost: float
) -> int | None:
    """Return the lowest branch layer at which members with that many heads fit, or None."""
    earliest = None
    for layer in reversed(range(len(counter.host))):
        if option_cost(counter, layer, counts, members) > max_cost + SLACK:
            break
        earliest = layer
    return earliest


def _no_room(
    counter: CostModel, layer: int, counts: Sequence[int], members: int, max_cost: float
) -> MaskError:
    kept = ", ".join(str(count) for count in counts[layer:])
    least = option_cost(counter, layer, counts, members)
    return MaskError(
        f"max_cost={max_cost} leaves no room for {members} member{'s' * (members > 1)} of "
        f"{counter.host.name} that part at block {layer} and keep {kept} heads from there on: they "
        f"cost {least:.3f} x the plain model. Allow more, branch later, keep fewer heads or take "
        "fewer members."
    )


def fill(
    counter: CostModel,
    layers: Sequence[int],
    members: int,
    max_cost: float,
    at_most: float,
    *,
    untied: bool = False,
) -> Option | None:
    """Fill the budget in the given layers (see `branch_options`); None if nothing fits.

    Members branch at the first of `layers`; in all other layers they keep all heads.
    """
    heads, first = counter.host.head_counts, layers[0]
    limits = [keep_count(at_most, n) if i in layers else n for i, n in enumerate(heads)]
    if members > 1:  # with all heads they would not branch there
        limits[first] = min(limits[first], heads[first] - 1)

    def priced(counts: Sequence[int]) -> float:
        return option_cost(counter, first, counts, members, untied=untied)

    def fits(counts: Sequence[int]) -> bool:
        within = all(count <= limit for count, limit in zip(counts, limits, strict=True))
        return within and priced(counts) <= max_cost

    best: tuple[int, ...] | None = None
    for keep in range(1, max(heads) + 1):
        counts = _counts(counter, layers, keep)
        if counts == best or not fits(counts):
            break
        best = counts
    if best is None:
        return None
    while True:
        more = next((counts for counts in _one_more(best, layers) if fits(counts)), None)
        if more is None:
            return Option(first, best, priced(best))
        best = more


def _one_more(counts: tuple[int, ...], layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Add one head to the block with the fewest heads (ties: the last block)."""
    for layer in sorted(layers, key=lambda i: (counts[i], -i)):
        yield (*counts[:layer], counts[layer] + 1, *counts[layer + 1 :])
