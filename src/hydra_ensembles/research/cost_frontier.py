"""The frontier: cost against a validation objective, over branch layers and heads kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._records import check_same_run, read_record, to_record
from .._tensors import model_fingerprint
from ..costs.budget import Option, counter_of, fill, masks_for, option_cost
from ..data import processes
from ..data.loaders import check_reiterable
from ..data.model_runs import collect_logits
from ..data.progress import progress_bar
from ..heads.gates import gate
from ..heads.head_mask import HeadMask, HeadScores, keep_count
from ..hosts import HostModel
from ..report.curves import pareto_front
from ..uncertainty import log_mean_probability


@dataclass(frozen=True)
class Point:
    """One ensemble of a frontier: what it costs and how good it is."""

    branch_layer: int
    keep_per_layer: tuple[int, ...]
    cost: float
    objective: float
    masks: tuple[HeadMask, ...] = field(repr=False)


@dataclass(frozen=True)
class Frontier:
    """Cost against a validation objective (lower is better).

    Attributes:
        points: Every ensemble that was tried, cheapest first.
        max_cost: The budget.
        objective: Name of the objective.
        settings: What the points depend on, so that only the same run continues a file.
    """

    points: tuple[Point, ...]
    max_cost: float
    objective: str = "objective"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> Point | None:
        """The best point within the budget (ties: the cheaper one); None if there is none."""
        within = [point for point in self.points if point.cost <= self.max_cost]
        return min(within, key=lambda point: (point.objective, point.cost), default=None)

    def best(self) -> list[Point]:
        """Return the points that no cheaper point equals, cheapest first."""
        points = {(point.cost, point.objective): point for point in reversed(self.points)}
        return [points[place] for place in pareto_front(list(points), sign=-1)]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return plain data as JSON; write it atomically to `path` if given."""
        chosen = self.chosen
        payload = {
            "settings": self.settings,
            "max_cost": self.max_cost,
            "objective": self.objective,
            "points": [
                {
                    "branch_layer": point.branch_layer,
                    "keep_per_layer": list(point.keep_per_layer),
                    "cost": point.cost,
                    "objective": point.objective,
                    "chosen": point is chosen,
                    "masks": [[[int(h) for h in row] for row in m.tolist()] for m in point.masks],
                }
                for point in self.points
            ],
        }
        return to_record("Frontier", payload, path, indent=1, seal=True)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Frontier:
        """Read what `to_json` wrote, from a file or from text."""
        data = read_record("Frontier", source)
        points = [
            Point(
                p["branch_layer"],
                tuple(p["keep_per_layer"]),
                p["cost"],
                p["objective"],
                tuple(HeadMask(rows) for rows in p["masks"]),
            )
            for p in data["points"]
        ]
        settings = data.get("settings", {})
        return cls(tuple(points), data["max_cost"], data["objective"], settings)

    def __str__(self) -> str:
        lines = [f"{self.objective} against cost, budget {self.max_cost} x"]
        for point in self.points:
            mark = "  <- chosen" if point is self.chosen else ""
            kept = ", ".join(map(str, point.keep_per_layer[point.branch_layer :]))
            lines.append(
                f"  {point.cost:6.3f} x  {point.objective:9.4f}  branch at block "
                f"{point.branch_layer}, heads kept {kept}{mark}"
            )
        return "\n".join(lines)


@processes.holds("folder")
def frontier(
    model: nn.Module | HostModel,
    choose: HeadScores | Sequence[HeadScores] | Callable[[Option], Sequence[HeadMask]],
    objective: Callable[[Sequence[HeadMask]], float] | Iterable[Any],
    batch: Any,
    *,
    members: int = 3,
    max_cost: float = 1.07,
    up_to: float = 1.5,
    keep: Sequence[float] = (1 / 3, 1 / 2, 3 / 4),
    name: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Frontier:
    """Measure the curve of cost against a validation objective, and mark the budget's choice.

    Example:
        >>> curve = frontier(model, score_heads(model, data), validation, batch)
        >>> curve.chosen, plot_frontier(curve)

    Args:
        model: The host model.
        choose: How to choose an option's heads: scores (see `masks_for`), or a function.
        objective: A function of the members' masks, lower when better; or labelled validation
            data, for the negative log-likelihood of the members' mean probability.
        batch: A batch in the host's form, for counting; only its shapes matter.
        members: Number of members M.
        max_cost: The budget.
        up_to: Cost up to which options are tried.
        keep: Shares of the branched blocks' heads to try at every branch layer.
        name: Name of the objective.
        folder: Keeps `frontier.json`, written after every point; its points are not run again. A
            file of another model, number of members or objective is refused.
        progress: Show a bar on a terminal.
    """
    counter = counter_of(model, batch)
    shape = counter.host.head_counts
    options = set()
    for layer in range(len(shape)):
        for share in keep:
            counts = tuple(
                n
                if i < layer
                else keep_count(share, n) - (i == layer and keep_count(share, n) == n)
                for i, n in enumerate(shape)
            )
            cost = option_cost(counter, layer, counts, members)
            if cost <= up_to and counts[layer] > 0:
                options.add(Option(layer, counts, cost))
        # the option that the budget itself allows belongs on the curve
        above = range(layer, len(counter.host))
        filled = fill(counter, above, members, max_cost, at_most=max(keep))
        options |= set() if filled is None else {filled}
    if callable(objective):
        value, called = objective, name or str(getattr(objective, "__name__", "objective"))
    else:
        value, called = _negative_log_likelihood(counter.host, objective), name or "NLL"
    target = None if folder is None else Path(folder) / "frontier.json"
    settings: dict[str, Any] = {"members": members, "objective": called}
    if target is not None:
        settings["model"] = model_fingerprint(counter.host.model)
    points: dict[tuple[int, tuple[int, ...]], Point] = {}
    if target is not None and target.exists():
        known = Frontier.from_json(target)
        check_same_run(target, known.settings, settings)
        points = {(point.branch_layer, point.keep_per_layer): point for point in known.points}
    ordered = sorted(options, key=lambda o: (o.cost, o.branch_layer, o.keep_per_layer))
    for option in progress_bar(ordered, description="frontier", enabled=progress):
        key = (option.branch_layer, option.keep_per_layer)
        if key not in points:
            masks = (
                tuple(choose(option))
                if callable(choose)
                else tuple(masks_for(option, choose, members=members))
            )
            points[key] = Point(*key, counter.ratio(masks), float(value(masks)), masks)
            if target is not None:
                Frontier(tuple(points.values()), max_cost, called, settings).to_json(target)
    by_cost = sorted(points.values(), key=lambda point: (point.cost, point.objective))
    result = Frontier(tuple(by_cost), max_cost, called, settings)
    if target is not None:
        result.to_json(target)
    return result


def _negative_log_likelihood(
    host: HostModel, data: Iterable[Any]
) -> Callable[[Sequence[HeadMask]], float]:
    """Return the NLL of members' mean probability as a function of their masks, by gates."""
    check_reiterable(data, name="validation")
    logits: dict[HeadMask, Tensor] = {}
    labels: list[Tensor] = []

    def value(masks: Sequence[HeadMask]) -> float:
        for mask in masks:
            if mask not in logits:
                with gate(host, mask):
                    outputs, truth = collect_logits(host.model, data, need_labels=True)
                logits[mask] = outputs[:, 0]
                assert truth is not None
                labels[:] = [truth]
        together = torch.stack([logits[mask] for mask in masks], 1)
        return float(F.nll_loss(log_mean_probability(together.double()), labels[0]))

    return value
