"""Figures of research: head roles, circuits, pruning, cost.

Every function takes `ax=None` and returns the `Axes`. Colours are Okabe and Ito's, which
colour-blind readers can tell apart, and each series has its own marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..evaluation.intervals import Interval
from ..heads.head_mask import HeadMask, HeadScores
from ..registry import imported
from ..report.svg import axes, colour, marker

if TYPE_CHECKING:
    from ..evaluation.benchmark_result import BenchmarkResult
    from .cost_frontier import Frontier
    from .pruning_sweep_results import PruneSweep

COUNTED = "counted multiply-adds"
NAMES = {
    "cls/Acc": "accuracy",
    "stability": "stability (class unchanged)",
    "cls/NLL": "NLL",
    "cal/ECE": "ECE",
    "ood/mean/AUROC": "OOD AUROC, mean over sets",
}
PERCENT = ("cls/Acc", "stability", "cal/ECE")


def plot_effects(
    scores: HeadScores, *, mask: HeadMask | None = None, ax: Any = None, title: str = ""
) -> Any:
    """Draw a table of effects, layers bottom up; dots mark effects within two standard errors.

    Layers of zeros were not examined and stay grey.

    Args:
        scores: `HeadScores`, with standard errors if known.
        mask: Its kept heads are framed, in layers that do not keep all.
        ax: Axes to draw on.
        title: The name of the scores by default.
    """
    patches = imported("matplotlib.patches", "A figure", "report")
    grid = _grid(list(scores))
    limit = float(np.nanmax(np.abs(grid))) or 1.0
    grid[np.nansum(np.abs(grid), 1) == 0] = np.nan
    ax = _head_table(
        ax, grid, "harm when edited", title or scores.name, cmap="RdBu_r", vmin=-limit, vmax=limit
    )
    ax.set_facecolor("0.9")
    if scores.standard_error is not None:
        y, x = np.nonzero(np.abs(grid) < 2 * _grid(list(scores.standard_error)))
        ax.plot(x, y, ".", color="0.45", markersize=3)
    partly = [] if mask is None else [p for p in mask.pairs() if not bool(mask[p[0]].all())]
    for layer, head in partly:
        corner = (head - 0.5, layer - 0.5)
        ax.add_patch(patches.Rectangle(corner, 1, 1, fill=False, lw=1.4, ec="black"))
    return ax


def plot_members(masks: Sequence[HeadMask], *, ax: Any = None, title: str = "members") -> Any:
    """Draw how many members keep each head."""
    count = len(masks)
    grid = _grid([sum(m[layer].int() for m in masks) for layer in range(len(masks[0]))])
    return _head_table(
        ax,
        grid,
        f"kept by, of {count}",
        title,
        range(count + 1),
        cmap="viridis",
        vmin=0,
        vmax=count,
    )


def plot_overlaps(overlaps: Mapping[tuple[str, str], float], *, ax: Any = None) -> Any:
    """Draw the Jaccard index of pairs of circuits as a matrix."""
    names = list(dict.fromkeys(name for pair in overlaps for name in pair))
    grid = np.eye(len(names))
    for (a, b), value in overlaps.items():
        i, j = names.index(a), names.index(b)
        grid[i, j] = grid[j, i] = value
    ax = axes(ax, (1.6 + 0.6 * len(names), 1.4 + 0.6 * len(names)))
    _matrix(ax, grid, names, cmap="Blues", vmin=0, vmax=1)
    ax.set_title("overlap of circuits")
    return ax


def plot_prune_sweep(
    sweep: PruneSweep,
    metric: str = "cls/Acc",
    *,
    criteria: Sequence[str] | None = None,
    boundary: float = 0.2,
    ax: Any = None,
) -> Any:
    """Draw a figure against the pruning ratio, one line per criterion, with 95 % intervals.

    Args:
        sweep: What `prune_sweep` returned.
        metric: One of `sweep.metrics`.
        criteria: Which lines; all by default.
        boundary: Ratio up to which the redundancy regime is shaded.
        ax: Axes to draw on.
    """
    ax = axes(ax, (6.4, 4.2))
    scale = 100.0 if metric in PERCENT else 1.0
    ratios = np.array(sweep.ratios)
    names = list(criteria or sweep.criteria)
    low, high = 100 * ratios.min(), 100 * ratios.max()
    margin = max(1.5, 0.05 * (high - low))
    for index, name in enumerate(names):
        found = [sweep.interval(name, ratio, metric) for ratio in ratios]
        shift = 0.5 * (index - (len(names) - 1) / 2)  # side by side, so that bars do not hide
        _series(ax, 100 * ratios + shift, found, index, scale=scale, label=name)
    base = scale * sweep.baseline[metric]
    ax.axhline(base, color="#555555", linewidth=1, linestyle=":", label="unpruned")
    ax.axvspan(low - 3 * margin, 100 * boundary + 5, color="#000000", alpha=0.05, linewidth=0)
    ax.set_xlim(low - 3 * margin, high + 3 * margin)
    for place, text in (
        (low - 2.8 * margin, "redundancy"),
        (100 * boundary + 5.6, "specialisation"),
    ):
        if place < high:
            ax.text(
                place, 1.01, text, transform=ax.get_xaxis_transform(), fontsize=8, style="italic"
            )
    ax.set_xticks(100 * ratios, [f"{100 * r:.0f}" for r in ratios])
    ax.set_xlabel("heads pruned, %")
    unit = ", %" if scale == 100 else ""
    ax.set_ylabel(NAMES.get(metric, metric) + unit)
    return _finish(ax)


def plot_head_scores(scores: HeadScores, *, title: str | None = None, ax: Any = None) -> Any:
    """Draw a heat map of scores, layers bottom up; layers of fewer heads end early."""
    name = scores.name if title is None else title
    return _head_table(ax, _grid(list(scores)), "score", name, cmap="cividis")


def plot_rank_correlation(
    scores: Mapping[str, HeadScores], *, lower_is_kept: Sequence[str] = (), ax: Any = None
) -> Any:
    """Draw Spearman's rank correlation between criteria; 1 = they keep the same heads."""
    from .pruning_sweep_results import rank_correlation

    names, matrix = rank_correlation(scores, lower_is_kept=lower_is_kept)
    ax = axes(ax, (0.55 * len(names) + 2.4, 0.5 * len(names) + 1.8))
    image = _matrix(ax, matrix.numpy(), names, cmap="PuOr", vmin=-1, vmax=1)
    ax.figure.colorbar(image, ax=ax, shrink=0.8, label="rank correlation")
    return ax


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
        _series(ax, places, [Interval(**row["ratio"]) for row in rows], i, label=name)
        counted = [row["counted_ratio"] for row in rows]
        ax.plot(places, counted, color=colour(i), linestyle="--", linewidth=1)
    ax.plot([], [], color="black", linestyle="--", linewidth=1, label=COUNTED)
    ax.axhline(1.0, color="#999999", linewidth=1, zorder=0)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative to the single model")
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.3)
    return _finish(ax, beside=True)


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
    ax.grid(alpha=0.3)
    return _finish(ax, beside=True)


def _grid(rows: Sequence[Any]) -> Any:
    """Return rows of any length as a rectangle; what is missing is NaN."""
    grid = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for i, row in enumerate(rows):
        grid[i, : len(row)] = [float(v) for v in row]
    return grid


def _head_table(
    ax: Any, grid: Any, label: str, title: str, ticks: Sequence[int] | None = None, **colours: Any
) -> Any:
    """Draw a value per head, layers bottom up, with a colour bar."""
    layers, heads = grid.shape
    ax = axes(ax, (1.2 + 0.45 * heads, 1.2 + 0.32 * layers))
    image = ax.imshow(grid, origin="lower", aspect="auto", **colours)
    ax.figure.colorbar(image, ax=ax, label=label, ticks=ticks)
    ax.set_xticks(range(0, heads, 1 + heads // 13))  # every second or fourth where there are many
    ax.set_yticks(range(0, layers, 1 + layers // 13))
    ax.set(xlabel="head", ylabel="layer", title=title)
    return ax


def _matrix(ax: Any, grid: Any, names: Sequence[str], **colours: Any) -> Any:
    """Draw a square matrix with its values written in the cells."""
    image = ax.imshow(grid, **colours)
    for (row, column), value in np.ndenumerate(grid):
        text = f"{value:.2f}".replace("-0.00", "0.00")
        shade = "white" if abs(value) > 0.6 else "black"
        ax.text(column, row, text, ha="center", va="center", color=shade, fontsize=7)
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(length=0)
    return image


def _series(
    ax: Any, x: Any, intervals: Sequence[Interval], index: int, *, scale: float = 1.0, label: str
) -> None:
    """Draw values with their intervals as one line."""
    values = scale * np.array([i.value for i in intervals])
    errors = np.abs(scale * np.array([[i.value - i.low, i.high - i.value] for i in intervals]).T)
    ax.errorbar(
        x,
        values,
        yerr=errors,
        label=label,
        color=colour(index),
        marker=marker(index),
        markersize=5,
        elinewidth=0.9,
        capsize=2,
    )


def _finish(ax: Any, *, beside: bool = False) -> Any:
    """Add the legend, inside or beside the axes, and hide the frame's upper right."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if beside else {}
    ax.legend(fontsize=8, frameon=False, **place)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
