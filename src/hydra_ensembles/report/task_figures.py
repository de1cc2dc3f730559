"""What pages show of each task: its headline figures, and numbers against the true ones."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..evaluation.tables import shown
from ..evaluation.task_metrics import LEVEL
from . import figures as charts
from .sections import Section
from .svg import axes, colour, page_axes, to_svg

if TYPE_CHECKING:
    from ..evaluation.results import Results

Headlines = dict[str, tuple[str, str]]
"""Unit and name by figure, the most important first."""

CLASSES: Headlines = {
    "cls/Acc": (" %", "accuracy"),
    "cal/ECE": (" %", "calibration error (ECE)"),
    "cls/NLL": ("", "negative log-likelihood"),
}
LABELS: Headlines = {
    "cls/mAP": (" %", "mean average precision (mAP)"),
    "cls/F1_micro": (" %", "micro F1"),
    "cls/Acc": (" %", "inputs with all labels right"),
    "cal/ECE": (" %", "calibration error by label (ECE)"),
    "cls/NLL": ("", "negative log-likelihood by label"),
}
NUMBERS: Headlines = {
    "reg/RMSE": ("", "root mean squared error"),
    "reg/Pearson": ("", "correlation with the true numbers"),
    "reg/NLL": ("", "negative log-likelihood"),
    "reg/CRPS": ("", "CRPS"),
}
TAGS: Headlines = {"ent/F1": (" %", "F1 of entities"), **CLASSES}
ANSWERS: Headlines = {
    "qa/EM": (" %", "exact answers"),
    "qa/F1": (" %", "F1 of the answers' tokens"),
    "cls/Loss": ("", "loss"),
}
POINTS = 400
"""Most examples in a drawing."""


def headlines(figures: Container[str]) -> Headlines:
    """Return the headline figures of the task whose figures these are."""
    for key, found in {
        "reg/RMSE": NUMBERS,
        "cls/mAP": LABELS,
        "ent/F1": TAGS,
        "qa/EM": ANSWERS,
    }.items():
        if key in figures:
            return {name: words for name, words in found.items() if name in figures}
    return CLASSES


def plot_numbers(results: Results, *, number: int = 0, series: int = 0, ax: Any = None) -> Any:
    """Draw answers against true numbers, with intervals where their variance is fitted."""
    ax = axes(ax)
    part = results.examples["id"]
    count = len(part["values"])
    rows = torch.linspace(0, count - 1, min(count, POINTS)).round().long()
    true, said = (part[name][rows, number].double() for name in ("targets", "values"))
    wide = None
    if "sigma" in part:
        level = torch.tensor((1 + LEVEL) / 2, dtype=torch.float64)
        wide = (torch.special.ndtri(level) * part["sigma"][rows, number]).tolist()
    ax.errorbar(
        true.tolist(),
        said.tolist(),
        yerr=wide,
        fmt="o",
        markersize=3,
        elinewidth=0.6,
        alpha=0.6,
        color=colour(series),
        ecolor=colour(series),
    )
    low, high = float(true.min()), float(true.max())
    ax.plot([low, high], [low, high], ":", color=charts.GUIDE, linewidth=1.2)
    ax.set(xlabel="true number", ylabel="answer")
    ax.set_title(f"{results.name}: RMSE {shown('reg/RMSE', results.get('reg/RMSE'))}")
    return ax


def numbers(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Draw the answers of each model of numbers against the true ones."""
    drawings = []
    for result in results:
        if "values" not in result.examples.get("id", {}):
            continue
        series = names.index(result.name)
        error = shown("reg/RMSE", result.get("reg/RMSE"))
        with page_axes((3.8, 3.0)) as ax:
            plot_numbers(result, series=series, ax=ax)
            label = f"Answers of {result.name} against true numbers: error {error}"
            drawing = to_svg(ax, label, name=f"numbers-{series}")
        covered = result.get("reg/Coverage")
        caption = f"RMSE {error}, Pearson {shown('reg/Pearson', result.get('reg/Pearson'))}"
        if covered is not None:
            width = shown("reg/Width", result.get("reg/Width"))
            caption += f"; intervals of {LEVEL:.0%} hold {100 * covered:.1f} %, {width} wide"
        drawings.append({"drawing": drawing, "name": result.name, "caption": caption})
    if not drawings:
        return None
    several = results[0].examples["id"]["values"].shape[1] > 1
    return Section(
        "numbers", "Answers and true numbers", {"drawings": drawings, "several": several}
    )


def labelled_by_class(results: Sequence[Results]) -> list[Results]:
    """Return the results whose answers have probabilities that are right or wrong."""
    able = ("confidence", "probabilities")
    return [r for r in results if any(name in r.examples.get("id", {}) for name in able)]


def judged(results: Sequence[Results]) -> list[Results]:
    """Return the results whose answers are right or wrong."""
    return [r for r in results if "correct" in r.examples.get("id", {})]
