"""Pictures of results: reliability, ROC, risk-coverage, heads of members, cost against quality.

Every function takes `ax=None` and returns the `Axes`; colours are Okabe and Ito's, safe for
colour-blind readers, and each line has a dash of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DataError, MissingDependencyError
from ..evaluation.result_tables import direction, shown
from ..heads.masks import HeadMask
from .curves import reliability, risk_curve, roc

if TYPE_CHECKING:
    from ..evaluation.results import Results

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _axes(ax: Any, size: tuple[float, float] = (4.8, 3.6)) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib: pip install 'hydra-ensembles[report]'."
        ) from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def _several(results: Results | Sequence[Results]) -> list[Results]:
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    if not found:
        raise DataError("There are no results to draw.")
    return found  # type: ignore[return-value]


def plot_reliability(results: Results, *, bins: int = 15, ax: Any = None) -> Any:
    """Draw accuracy against confidence in equal-width bins, with the diagonal (DeGroot 1983)."""
    ax = _axes(ax)
    bars = reliability(results, bins=bins)
    ax.bar(
        [bar.low for bar in bars],
        [bar.accuracy for bar in bars],
        width=1 / bins,
        align="edge",
        color=COLOURS[0],
        edgecolor="white",
        label="accuracy",
    )
    ax.plot([0, 1], [0, 1], ":", color="black", label="calibrated")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.set_title(f"{results.name}: ECE {shown('cal/ECE', results.get('cal/ECE'))} %")
    ax.legend(loc="upper left")
    return ax


def plot_roc(results: Results | Sequence[Results], name: str, *, ax: Any = None) -> Any:
    """Draw the ROC of one out-of-distribution set by the main score, OOD positive."""
    ax = _axes(ax)
    for index, result in enumerate(_several(results)):
        points = roc(result, name)
        area = shown("AUROC", result.get(f"ood/{name}/AUROC"))
        ax.plot(*zip(*points, strict=True), **_style(index), label=f"{result.name}: AUROC {area} %")
    ax.plot([0, 1], [0, 1], ":", color="black", linewidth=1)
    ax.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="false positive rate", ylabel="true positive rate")
    ax.set_title(f"out of distribution: {name}")
    ax.legend(loc="lower right")
    return ax


def plot_risk_coverage(results: Results | Sequence[Results], *, ax: Any = None) -> Any:
    """Draw the error rate among the answered against the share answered (El-Yaniv 2010)."""
    ax = _axes(ax)
    for index, result in enumerate(_several(results)):
        area = shown("sc/AURC", result.get("sc/AURC"))
        points = risk_curve(result)
        ax.plot(*zip(*points, strict=True), **_style(index), label=f"{result.name}: AURC {area} %")
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel="error rate among the answered")
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left")
    return ax


def plot_head_map(
    masks: HeadMask | Sequence[HeadMask], *, names: Sequence[str] | None = None, ax: Any = None
) -> Any:
    """Draw which heads members keep: layers upwards, heads of a layer side by side, by member.

    A filled square is a kept head, an empty one is pruned; members stand beside each other.
    """
    each = [masks] if isinstance(masks, HeadMask) else list(masks)
    if not each:
        raise DataError("There are no masks to draw.")
    ax = _axes(ax, (1.2 + 0.24 * sum(max(m.shape) + 1 for m in each), 1.2 + 0.24 * len(each[0])))
    left, centres = 0.0, []
    for index, mask in enumerate(each):
        colour = COLOURS[index % len(COLOURS)]
        for layer, row in enumerate(mask.tolist()):
            for head, kept in enumerate(row):
                ax.scatter(
                    left + head,
                    layer,
                    marker="s",
                    s=42,
                    facecolor=colour if kept else "none",
                    edgecolor=colour if kept else "#999999",
                    linewidth=0.8,
                )
        centres.append(left + (max(mask.shape) - 1) / 2)
        left += max(mask.shape) + 1.0
    labels = list(names) if names is not None else [f"member {i + 1}" for i in range(len(each))]
    ax.set_xticks(centres, labels)
    ax.set_yticks(range(len(each[0])))
    ax.set(ylabel="layer", xlim=(-1, left - 1), ylim=(-0.7, len(each[0]) - 0.3))
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def plot_frontier(
    points: Mapping[str, tuple[float, float]], *, figure: str = "ood/mean/AUROC", ax: Any = None
) -> Any:
    """Draw a figure against cost, and the line of models that none beats in both.

    Args:
        points: Cost (relative to the single model) and figure, by the model's name.
        figure: Name of the figure, which decides whether higher or lower is better.
        ax: Axes to draw on.
    """
    if not points:
        raise DataError("There are no points to draw.")
    ax = _axes(ax)
    sign = direction(figure) or 1
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points.values(), key=lambda p: (p[0], -sign * p[1])):
        if not front or sign * value > sign * front[-1][1]:
            front.append((cost, value))
    ax.plot(*zip(*front, strict=True), ":", color="black", linewidth=1, zorder=1)
    for index, (name, (cost, value)) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        ax.scatter(cost, value, color=colour, marker=MARKERS[index % len(MARKERS)], zorder=2)
        ax.annotate(name, (cost, value), xytext=(6, 4), textcoords="offset points", fontsize=8)
    ax.set(xlabel="multiply-adds, single model = 1", ylabel=figure)
    ax.margins(x=0.2, y=0.15)
    return ax


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
