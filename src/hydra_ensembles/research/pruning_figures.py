"""Pictures of pruning: curves, alpha, heat maps of scores, rank correlation, shift gaps.

Every function takes `ax=None` and returns the `Axes`; colours are Okabe and Ito's, safe for
colour-blind readers, and each line has a marker of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..heads.head_mask import HeadScores
from ..report.svg import axes, colour, marker

if TYPE_CHECKING:
    from .pruning_sweep_results import PruneSweep

NAMES = {
    "cls/Acc": "accuracy",
    "stability": "stability (class unchanged)",
    "cls/NLL": "NLL",
    "cal/ECE": "ECE",
    "ood/mean/AUROC": "OOD AUROC, mean over sets",
}
_PERCENT = ("cls/Acc", "stability", "cal/ECE")


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
    scale = 100.0 if metric in _PERCENT else 1.0
    ratios = np.array(sweep.ratios)
    names = list(criteria or sweep.criteria)
    low, high = 100 * ratios.min(), 100 * ratios.max()
    margin = max(1.5, 0.05 * (high - low))
    for index, name in enumerate(names):
        found = [sweep.interval(name, ratio, metric) for ratio in ratios]
        shift = 0.5 * (index - (len(names) - 1) / 2)  # side by side, so that bars do not hide
        mean = np.array([i.value for i in found])
        error = np.abs(np.array([[i.value - i.low, i.high - i.value] for i in found]).T)
        ax.errorbar(
            100 * ratios + shift,
            scale * mean,
            yerr=scale * error,
            label=name,
            color=colour(index),
            marker=marker(index),
            markersize=5,
            linewidth=1.6,
            elinewidth=0.9,
            capsize=2,
        )
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
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return ax


def plot_alpha(
    sweep: PruneSweep,
    lines: Mapping[float, str],
    *,
    metric: str = "cls/Acc",
    ratios: Sequence[float] | None = None,
    ax: Any = None,
) -> Any:
    """Draw a figure against HIES's alpha, one line per pruning ratio.

    Args:
        sweep: What `prune_sweep` returned.
        lines: Criterion's label for each alpha; `{0.0: "entropy", 0.5: "hies", 1.0: "his"}`.
        metric: One of `sweep.metrics`.
        ratios: Which ratios; all by default.
        ax: Axes to draw on.
    """
    ax = axes(ax, (5.2, 3.8))
    scale = 100.0 if metric in _PERCENT else 1.0
    alphas = sorted(lines)
    for index, ratio in enumerate(ratios or sweep.ratios):
        found = [sweep.interval(lines[alpha], ratio, metric) for alpha in alphas]
        error = np.abs(np.array([[i.value - i.low, i.high - i.value] for i in found]).T)
        ax.errorbar(
            np.array(alphas) + 0.006 * index,
            [scale * i.value for i in found],
            yerr=scale * error,
            label=f"{ratio:.0%} pruned",
            color=colour(index),
            marker=marker(index),
            capsize=2,
            elinewidth=0.9,
        )
    ax.axhline(scale * sweep.baseline[metric], color="#555555", linewidth=1, linestyle=":")
    ends = {0.0: "0\nentropy", 1.0: "1\nHIS"}
    ax.set_xticks(alphas, [ends.get(alpha, f"{alpha:g}") for alpha in alphas])
    ax.set_xlabel("alpha of HIES")
    ax.set_ylabel(NAMES.get(metric, metric) + (", %" if scale == 100 else ""))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return ax


def plot_head_scores(scores: HeadScores, *, title: str | None = None, ax: Any = None) -> Any:
    """Draw a heat map of scores: layers down, heads across; layers of fewer heads end early."""
    width, depth = max(scores.shape), len(scores)
    ax = axes(ax, (0.35 * width + 2.2, 0.35 * depth + 1.4))
    grid = np.ma.masked_all((depth, width))
    for layer, row in enumerate(scores):
        grid[layer, : len(row)] = row.numpy()
    image = ax.imshow(grid, cmap="cividis", aspect="equal")
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.set_xticks(range(width))
    ax.set_yticks(range(depth))
    ax.tick_params(length=0, labelsize=7)
    ax.set_title(scores.name if title is None else title, fontsize=10)
    ax.figure.colorbar(image, ax=ax, shrink=0.8).ax.tick_params(labelsize=7)
    return ax


def plot_rank_correlation(
    scores: Mapping[str, HeadScores], *, lower_is_kept: Sequence[str] = (), ax: Any = None
) -> Any:
    """Draw Spearman's rank correlation between criteria; 1 = they keep the same heads."""
    from .pruning_sweep_results import rank_correlation

    names, matrix = rank_correlation(scores, lower_is_kept=lower_is_kept)
    ax = axes(ax, (0.55 * len(names) + 2.4, 0.5 * len(names) + 1.8))
    image = ax.imshow(matrix.numpy(), cmap="PuOr", vmin=-1, vmax=1)
    for row in range(len(names)):
        for column in range(len(names)):
            value = float(matrix[row, column])
            dark = abs(value) > 0.6
            text = f"{value:.2f}".replace("-0.00", "0.00")
            colour = "white" if dark else "black"
            ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(length=0)
    ax.figure.colorbar(image, ax=ax, shrink=0.8, label="rank correlation")
    return ax


def plot_shift_gaps(gaps: Sequence[Mapping[str, Any]], *, ax: Any = None) -> Any:
    """Draw the gap between shifted and clean loss before and after pruning.

    Args:
        gaps: Records with `shift`, `criterion`, `ratio`, `gap_before`, `gap_after`,
            `gap_change_error`.
        ax: Axes to draw on.
    """
    ax = axes(ax, (6.4, 3.8))
    shifts = list(dict.fromkeys(gap["shift"] for gap in gaps))
    kinds = list(dict.fromkeys((gap["criterion"], gap["ratio"]) for gap in gaps))
    width = 0.8 / (len(kinds) + 1)
    for place, shift in enumerate(shifts):
        before = next(gap["gap_before"] for gap in gaps if gap["shift"] == shift)
        label = "unpruned" if place == 0 else None
        ax.bar(place - 0.4 + width / 2, before, width, color="#999999", label=label)
    for index, (criterion, ratio) in enumerate(kinds):
        chosen = {g["shift"]: g for g in gaps if (g["criterion"], g["ratio"]) == (criterion, ratio)}
        ax.bar(
            [place - 0.4 + width * (index + 1.5) for place in range(len(shifts))],
            [chosen[shift]["gap_after"] for shift in shifts],
            width,
            yerr=[1.96 * chosen[shift]["gap_change_error"] for shift in shifts],
            color=colour(index),
            label=f"{criterion}, {ratio:.0%} pruned",
            error_kw={"elinewidth": 0.9, "capsize": 2},
        )
    ax.axhline(0, color="#000000", linewidth=0.8)
    ax.set_xticks(range(len(shifts)), [shift.replace("_", " ") for shift in shifts])
    ax.set_ylabel("loss on shifted - loss on clean data")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return ax
