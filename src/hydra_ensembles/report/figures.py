"""Figures of results: reliability, ROC, risk-coverage, heads of members, cost against quality.

Every function takes `ax=None` and returns the `Axes`. Lines and points bear the name of their
series (`series-0`, `series-1`, ...), by which the page shows and hides them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..evaluation.figures import direction
from ..evaluation.tables import is_rate, shown
from ..heads.head_mask import HeadMask
from .curves import knows, pareto_front, reliability, risk_curve, roc
from .svg import axes, colour, line_style, marker

if TYPE_CHECKING:
    from ..evaluation.results import Results

GUIDE = "#999999"


def plot_reliability(results: Results, *, bins: int = 15, series: int = 0, ax: Any = None) -> Any:
    """Draw accuracy against confidence in equal-width bins, with the diagonal (DeGroot 1983).

    The paler a bar, the fewer its examples.
    """
    ax = axes(ax)
    bars = reliability(results, bins=bins)
    most = max((bar.count for bar in bars), default=1)
    drawn = ax.bar(
        [bar.low for bar in bars],
        [bar.accuracy for bar in bars],
        width=1 / bins,
        align="edge",
        color=colour(series),
        edgecolor=colour(series),
        linewidth=0.6,
    )
    for patch, bar in zip(drawn, bars, strict=True):
        patch.set_alpha(0.3 + 0.7 * (bar.count / most) ** 0.5)
    ax.plot([0, 1], [0, 1], ":", color=GUIDE, linewidth=1.2)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    ax.set_title(f"{results.name}: ECE {shown('cal/ECE', results.get('cal/ECE'))} %")
    _percent(ax.xaxis, ax.yaxis)
    return ax


def plot_roc(results: Results | Sequence[Results], name: str, *, ax: Any = None) -> Any:
    """Draw the ROC of one out-of-distribution set, OOD positive.

    One line per model by its uncertainty; then one more per model that has novelty.
    """
    ax = axes(ax)
    listed = _several(results)
    for index, result in enumerate(listed):
        if f"ood/{name}" not in result.examples and len(listed) > 1:
            continue
        area = shown("AUROC", result.get(f"ood/{name}/AUROC"))
        _line(ax, roc(result, name), index, f"{result.name}: AUROC {area} %")
    for index, result in enumerate(by_novelty(listed), start=len(listed)):
        if knows(result, name):
            area = shown("AUROC", result.get(f"ood/{name}/novelty/AUROC"))
            points = roc(result, name, "novelty")
            _line(ax, points, index, f"{result.name}, novelty: AUROC {area} %")
    ax.plot([0, 1], [0, 1], ":", color=GUIDE, linewidth=1.2)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1.02),
        xlabel="known examples taken for outliers",
        ylabel="outliers found",
        title=f"out of distribution: {name}",
    )
    _percent(ax.xaxis, ax.yaxis)
    ax.legend(loc="lower right")
    return ax


def plot_risk_coverage(results: Results | Sequence[Results], *, ax: Any = None) -> Any:
    """Draw the error rate among the answered against the share answered (El-Yaniv 2010)."""
    ax = axes(ax)
    for index, result in enumerate(_several(results)):
        area = shown("sc/AURC", result.get("sc/AURC"))
        _line(ax, risk_curve(result), index, f"{result.name}: AURC {area} %")
    ax.set(xlim=(0, 1), xlabel="coverage: share answered", ylabel="risk: error rate among them")
    ax.set_ylim(bottom=0)
    _percent(ax.xaxis, ax.yaxis)
    ax.legend(loc="upper left")
    return ax


def plot_head_map(
    masks: HeadMask | Sequence[HeadMask],
    *,
    names: Sequence[str] | None = None,
    branch: int | None = None,
    series: int = 0,
    ax: Any = None,
) -> Any:
    """Draw which heads members keep: layers upwards, heads of a layer side by side, by member.

    A filled square is a kept head, an empty one is pruned; members stand beside each other.

    Args:
        masks: One per member.
        names: Of the members.
        branch: First layer in which members differ; the trunk below it is drawn paler.
        series: Colour of the first member.
        ax: Axes to draw on.
    """
    members = [masks] if isinstance(masks, HeadMask) else list(masks)
    if not members:
        raise DataError("There are no masks to draw.")
    depth = len(members[0])
    ax = axes(ax, (1.2 + 0.24 * sum(max(m.shape) + 1 for m in members), 1.2 + 0.24 * depth))
    left, centres = 0.0, []
    for index, mask in enumerate(members):
        shade = colour(series + index)
        places: dict[tuple[bool, bool], list[tuple[float, int]]] = {}
        for layer, row in enumerate(mask.tolist()):
            for head, kept in enumerate(row):
                trunk = branch is not None and layer < branch
                places.setdefault((bool(kept), trunk), []).append((left + head, layer))
        for (kept, trunk), points in places.items():
            ax.scatter(
                *zip(*points, strict=True),
                marker="s",
                s=42,
                facecolor=shade if kept else "none",
                edgecolor=shade if kept else GUIDE,
                linewidth=0.8,
                alpha=0.42 if trunk else 1.0,
            )
        centres.append(left + (max(mask.shape) - 1) / 2)
        left += max(mask.shape) + 1.0
    labels = list(names) if names is not None else [f"member {i + 1}" for i in range(len(members))]
    ax.set_xticks(centres, labels)
    ax.set_yticks(range(0, depth, 1 if depth <= 8 else 2))
    ax.set(ylabel="layer", xlim=(-1, left - 1), ylim=(-0.7, depth - 0.3))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def plot_cost_quality(
    points: Mapping[str, tuple[float, float]],
    *,
    figure: str = "ood/mean/AUROC",
    label: str | None = None,
    ax: Any = None,
) -> Any:
    """Draw a figure against cost, and the line of models that none beats in both.

    Args:
        points: Cost (relative to the single model) and figure, by the model's name.
        figure: Name of the figure, which decides whether higher or lower is better.
        label: Of the axis; the figure's name by default.
        ax: Axes to draw on.
    """
    if not points:
        raise DataError("There are no points to draw.")
    ax = axes(ax)
    sign = direction(figure) or 1
    front = pareto_front(list(points.values()), sign=sign)
    ax.plot(*zip(*front, strict=True), ":", color=GUIDE, linewidth=1.2, zorder=1)
    for index, (cost, value) in enumerate(points.values()):
        (dot,) = ax.plot(cost, value, color=colour(index), marker=marker(index), linestyle="none")
        dot.set_gid(f"series-{index}")
    ax.set_xlabel("multiply-adds, single model = 1")
    ax.set_ylabel((label or figure) + (" ↑" if sign > 0 else " ↓"))
    ax.margins(x=0.2, y=0.2)
    ax.set_xlim(left=0)
    _name_points(ax, points)
    if is_rate(figure):
        _percent(ax.yaxis)
    return ax


def _name_points(ax: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside points, on lines that no other name takes."""
    middle = max(cost for cost, _ in points.values()) * 0.6
    taken: list[Any] = []
    for name, place in points.items():
        side, away = ("right", -8) if place[0] > middle else ("left", 8)
        text = ax.annotate(
            name,
            place,
            xytext=(away, 5),
            textcoords="offset points",
            ha=side,
            fontsize="small",
            bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 1},  # no line through it
        )
        for rise in (5, -13, 19, -27, 33):
            text.xyann = (away, rise)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def by_novelty(results: Sequence[Results]) -> list[Results]:
    """Return the models whose novelty was measured, in the order of their lines."""
    return [result for result in results if "score:novelty" in result.examples.get("id", {})]


def _several(results: Results | Sequence[Results]) -> list[Results]:
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    if not listed:
        raise DataError("There are no results to draw.")
    return listed  # type: ignore[return-value]


def _line(ax: Any, points: Sequence[tuple[float, float]], series: int, label: str) -> None:
    (line,) = ax.plot(*zip(*points, strict=True), **line_style(series), label=label)
    line.set_gid(f"series-{series}")


def _percent(*sides: Any) -> None:
    for side in sides:
        side.set_major_formatter(lambda share, _: f"{round(100 * share, 6):g} %")
