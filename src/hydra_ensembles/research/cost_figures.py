"""Pictures of cost: measured against counted ratios, growth, and the frontier of cost and quality.

Every function takes `ax=None` and returns the `Axes`; colours are Okabe and Ito's, safe for
colour-blind readers, and each series has a marker of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..report.svg import axes, colour, marker

if TYPE_CHECKING:
    from ..evaluation.benchmark_result import BenchmarkResult
    from .cost_frontier import Frontier

COUNTED = "counted multiply-adds"


def plot_benchmark(result: BenchmarkResult, *, ax: Any = None, title: str | None = None) -> Any:
    """Show every model's latency relative to the first, with its interval, beside what is counted.

    One row per model, one colour per batch size; a black bar marks the counted multiply-adds.
    """
    names, sizes = result.names, result.batch_sizes
    ax = axes(ax, (7.0, 1.4 + 0.42 * len(names)))
    step = 0.6 / max(1, len(sizes))
    for row, name in enumerate(names):
        counted = result.counted(name, sizes[0])
        label = COUNTED if row == 0 else None
        ax.plot([counted] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2, label=label)
        for i, size in enumerate(sizes):
            ratio = result.ratio(name, size)
            ax.errorbar(
                ratio.value,
                row + (i - (len(sizes) - 1) / 2) * step,
                xerr=[[ratio.value - ratio.low], [ratio.high - ratio.value]],
                color=colour(i),
                marker=marker(i),
                markersize=5,
                capsize=2,
                linestyle="none",
                label=f"measured, batch {size}" if row == 0 else None,
            )
    ax.axvline(1.0, color="#999999", linewidth=1, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(left=min(0.8, ax.get_xlim()[0]))
    ax.set_xlabel(f"latency relative to {names[0]!r} (median of paired ratios, 95 % interval)")
    facts = result.settings
    ax.set_title(
        title
        or f"{facts.get('shape', '')} {facts.get('dtype')}, {facts.get('threads')} threads".strip()
    )
    below = (0.5, -0.5 / (0.42 * len(names) + 0.3))  # under the label of the axis
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=below, ncols=4, frameon=False)
    ax.grid(axis="x", alpha=0.3)
    return ax


def plot_growth(growth: BenchmarkResult | Mapping[str, Any], *, ax: Any = None) -> Any:
    """Show how cost grows: with members (a `BenchmarkResult`) or with tokens (points by length).

    Solid: measured, with its interval; dashed: counted.
    """
    ax = axes(ax, (7.4, 4.0))
    if isinstance(growth, Mapping):
        places = [point["tokens"] for point in growth["points"]]
        names = [row["name"] for row in growth["points"][0]["rows"]][1:]
        series = {
            name: [next(r for r in p["rows"] if r["name"] == name) for p in growth["points"]]
            for name in names
        }
        ax.set_xscale("log", base=2)
        ax.set_xticks(places, [str(place) for place in places])
        ax.set_xlabel("tokens")
        title = f"{growth['shape']}: cost against the sequence length, batch 1"
    else:
        rows = growth.rows()[1:]
        places = [int(row["name"]) for row in rows]
        series = {"branch at the last block": rows}
        ax.set_xticks(places)
        ax.set_xlabel("members M")
        title = f"{growth.settings.get('shape')}: cost against the number of members, batch 1"
    for i, (name, rows) in enumerate(series.items()):
        shade = colour(i)
        values = [row["ratio"]["value"] for row in rows]
        below = [row["ratio"]["value"] - row["ratio"]["low"] for row in rows]
        above = [row["ratio"]["high"] - row["ratio"]["value"] for row in rows]
        ax.errorbar(
            places, values, [below, above], color=shade, marker=marker(i), capsize=2, label=name
        )
        counted = [row["counted_ratio"] for row in rows]
        ax.plot(places, counted, color=shade, linestyle="--", linewidth=1)
    ax.plot([], [], color="black", linestyle="--", linewidth=1, label=COUNTED)
    ax.axhline(1.0, color="#999999", linewidth=1, zorder=0)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative to the single model")
    ax.set_title(title, fontsize=11)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    ax.grid(alpha=0.3)
    return ax


def plot_frontier(frontier: Frontier, *, ax: Any = None) -> Any:
    """Show cost against the objective: points by branch layer, the frontier, the chosen point."""
    ax = axes(ax, (6.4, 4.2))
    layers = sorted({point.branch_layer for point in frontier.points}, reverse=True)
    for i, layer in enumerate(layers):
        points = [point for point in frontier.points if point.branch_layer == layer]
        ax.plot(
            [point.cost for point in points],
            [point.objective for point in points],
            color=colour(i),
            marker=marker(i),
            linestyle="none",
            label=f"branch at block {layer}",
        )
    best = frontier.best()
    ax.step(
        [point.cost for point in best],
        [point.objective for point in best],
        where="post",
        color="black",
        linewidth=1,
        label="best for its cost",
    )
    chosen = frontier.chosen
    if chosen is not None:
        ax.plot(
            chosen.cost,
            chosen.objective,
            marker="o",
            markersize=16,
            fillstyle="none",
            color="black",
            linestyle="none",
            label="chosen",
        )
    ax.axvline(frontier.max_cost, color="#999999", linestyle=":", label="budget")
    ax.set_xlabel("counted multiply-adds relative to the plain model")
    ax.set_ylabel(f"{frontier.objective} on validation data (lower is better)")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    ax.grid(alpha=0.3)
    return ax
