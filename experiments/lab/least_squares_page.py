"""The page on least squares: a table per task, what is kept of the gain, and one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .page import grid, shown
from .records import Records

MI = "/mutual-information"
NLL = "post/cls/NLL"
DENSE, DEEP = "single", "Deep Ensemble"


def least_squares_tables(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return one table of folded models and one of pruned ones, all tasks below each other."""
    every = {t: Records.read(source, folder) for source, t in table["view"]["tables"].items()}
    lines: list[str] = []
    for title, wanted in table["tables"].items():
        head = ["task, row", "cost", "accuracy", "NLL raw / scaled", "scaled, minus single"]
        head += ["scaled, minus Deep Ensemble", "outliers: MSP / MI"]
        rows = []
        for task, records in every.items():
            names = [name for name in wanted if records.draws(name)]
            rows += [_cells(records, task, name) for name in names]
        lines += [f"### {title}", "", *grid(head, rows), ""]
    return lines + [_kept(task, records) for task, records in every.items() if records.rows]


def _cells(records: Records, task: str, name: str) -> list[str]:
    """Return a row: figures, and paired differences, bold where the interval excludes 0."""
    several = (records.mean(name, "div/MI") or 0) > 0
    outliers = [shown("AUROC", records.mean(name, "ood/mean/AUROC"))]
    outliers += [shown("AUROC", records.mean(name, f"ood/mean{MI}/AUROC"))] * several
    return [
        f"{task}: {name}",
        f"{records.mean(name, 'cost'):.2f}",
        shown("cls/Acc", records.mean(name, "cls/Acc")),
        " / ".join(shown(key, records.mean(name, key)) for key in ("cls/NLL", NLL)),
        *(_span(records.differences.get((name, other, NLL))) for other in (DENSE, DEEP)),
        " / ".join(outliers),
    ]


def _span(span: tuple[float, float, float, str] | None) -> str:
    if span is None:
        return "–"
    value, low, high = span[:3]
    text = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _kept(task: str, records: Records) -> str:
    """Say how much of the Deep Ensemble's gain over one host is kept."""
    single, deep = records.mean(DENSE, NLL), records.mean(DEEP, NLL)
    if single is None or deep is None:
        return ""
    kept = [
        f"{name} {(found - single) / (deep - single):.0%}"
        for name in ("soup", "folded, members by states", "folded, student")
        if (found := records.mean(name, NLL)) is not None
    ]
    gain = f"{deep - single:+.3f}"
    return f"- {task}: of the Deep Ensemble's gain ({gain}) are kept by {', '.join(kept)}."


def least_squares_picture(table: Mapping[str, Any], folder: Path) -> Path | None:
    """Draw accuracy and NLL at one temperature over counted cost, a column per task."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    every = {t: Records.read(source, folder) for source, t in table["view"]["tables"].items()}
    every = {title: records for title, records in every.items() if records.rows}
    if not every:
        return None
    lines = {
        "pruned and refitted": (
            "#2980b9",
            ["pruned to 0.33", "pruned to 0.5", "pruned to 0.75", "single"],
        ),
        "pruned only": (
            "#aaaaaa",
            [
                "pruned to 0.33, no refit",
                "pruned to 0.5, no refit",
                "pruned to 0.75, no refit",
                "single",
            ],
        ),
        "folded (student)": (
            "#c0392b",
            [
                "folded at 0.33, student",
                "folded at 0.5, student",
                "folded at 0.75, student",
                "folded, student",
            ],
        ),
        "Deep Ensemble": ("#2c3e50", ["Deep Ensemble"]),
    }
    figure, axes = plt.subplots(
        2, len(every), figsize=(3.2 * len(every) + 0.6, 5.4), squeeze=False, sharex=True
    )
    for column, (title, records) in enumerate(every.items()):
        for row, (key, label) in enumerate(
            (("cls/Acc", "accuracy, %"), (NLL, "NLL at one temperature"))
        ):
            axis = axes[row][column]
            for name, (colour, rows) in lines.items():
                points = [
                    (records.mean(one, "cost"), value * (100 if row == 0 else 1))
                    for one in rows
                    if (value := records.mean(one, key)) is not None
                ]
                if points:
                    axis.plot(
                        *zip(*points, strict=True), "o-", color=colour, markersize=4, label=name
                    )
            axis.grid(alpha=0.25)
            dense = records.mean(DENSE, key)
            if dense is not None:  # what is far off would hide the rest
                dense *= 100 if row == 0 else 1
                axis.set_ylim(
                    *((dense - 12, dense + 3) if row == 0 else (0.8 * dense, 1.8 * dense))
                )
            if row == 0:
                axis.set_title(title, fontsize=10)
            else:
                axis.set_xlabel("counted cost")
            if column == 0:
                axis.set_ylabel(label)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    path = folder / f"{table['name']}.png"
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=100, format="png", metadata={"Software": ""})
    plt.close(figure)
    beside.replace(path)
    return path
