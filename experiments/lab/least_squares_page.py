"""The page on least squares: a table per task, what is kept of the gain, and one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .page import grid, shown
from .records import Records

MI = "/mutual-information"
NLL = "post/cls/NLL"
COLUMNS = {
    "accuracy": "cls/Acc",
    "NLL raw": "cls/NLL",
    "NLL scaled": NLL,
    "ECE": "cal/ECE",
    "error AUROC": "fail/AUROC",
}
DENSE, DEEP = "single", "Deep Ensemble"


def families(records: Records) -> list[str]:
    """Return the sets of outliers of a task, each as `group/family`."""
    columns = {column for line in records.rows.values() for column in line}
    found = [c.split("/")[1:3] for c in columns if c.startswith("ood/") and c.count("/") == 3]
    return sorted({f"{group}/{name}" for group, name in found if name not in ("mean", MI[1:])})


def least_squares_tables(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a table per task: all rows that ran, and differences to the references."""
    lines: list[str] = []
    for source, title in table["view"]["tables"].items():
        records = Records.read(source, folder)
        if not records.rows:
            continue
        sets = families(records)
        head = ["", "cost", *COLUMNS, *(f"{s.split('/')[1]}: MSP, MI" for s in sets)]
        rows = []
        for name in dict.fromkeys(row for row, _ in records.rows):
            cells = [name, f"{records.mean(name, 'cost'):.2f}"]
            cells += [shown(figure, records.mean(name, figure)) for figure in COLUMNS.values()]
            for one in sets:
                msp, mi = (records.mean(name, f"ood/{one}{key}/AUROC") for key in ("", MI))
                several = (records.mean(name, "div/MI") or 0) > 0
                cells.append(shown("AUROC", msp) + (f", {shown('AUROC', mi)}" if several else ""))
            rows.append(cells)
        lines += [f"### {title}", "", *grid(head, rows), "", *_differences(records), ""]
    return lines


def _differences(records: Records) -> list[str]:
    """Return what is kept of the Deep Ensemble's gain, and paired differences with intervals."""
    single, deep = records.mean(DENSE, NLL), records.mean(DEEP, NLL)
    lines = []
    if single is not None and deep is not None:
        gain = records.differences.get((DEEP, DENSE, NLL))
        span = "" if gain is None else f" [{gain[1]:+.3f}, {gain[2]:+.3f}]"
        kept = [
            f"{name} {(found - single) / (deep - single):.0%}"
            for name in dict.fromkeys(row for row, _ in records.rows)
            if name.startswith(("folded", "soup", "linear"))
            and (found := records.mean(name, NLL)) is not None
        ]
        lines += [
            f"The Deep Ensemble's gain over one host, NLL at one temperature: {deep - single:+.3f}"
            f"{span}. Share of it that is kept: {', '.join(kept)}.",
            "",
        ]
    keys = ("cls/Acc", NLL, "ood/mean/AUROC", f"ood/mean{MI}/AUROC")
    heads = ("accuracy", "NLL scaled", "outliers by MSP", "outliers by MI")
    rows = []
    for name in dict.fromkeys(row for row, _ in records.rows):
        for other in (DENSE, DEEP):
            if name in (DENSE, DEEP):
                continue
            members = min(records.mean(row, "div/MI") or 0.0 for row in (name, other))
            spans = [
                records.differences.get((name, other, key)) if members or MI not in key else None
                for key in keys
            ]
            if any(spans):
                rows.append([f"{name} minus {other}", *map(_span, keys, spans)])
    if rows:
        note = "Paired differences with 95 % intervals over test examples and draws; bold where 0 is outside:"
        lines += [note, "", *grid(["", *heads], rows)]
    return lines


def _span(key: str, span: tuple[float, float, float, str] | None) -> str:
    if span is None:
        return "–"
    scale, digits = (1, 3) if key.endswith("NLL") else (100, 1)
    value, low, high = (scale * number for number in span[:3])
    text = f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


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
        "pruned and refitted": ("#2980b9", ["pruned to 0.33", "pruned to 0.5", "pruned to 0.75", "single"]),
        "pruned only": ("#aaaaaa", ["pruned to 0.33, no refit", "pruned to 0.5, no refit", "pruned to 0.75, no refit", "single"]),
        "folded (student)": ("#c0392b", ["folded at 0.33, student", "folded at 0.5, student", "folded at 0.75, student", "folded, student"]),
        "Deep Ensemble": ("#2c3e50", ["Deep Ensemble"]),
    }
    figure, axes = plt.subplots(2, len(every), figsize=(3.2 * len(every) + 0.6, 5.4), squeeze=False, sharex=True)
    for column, (title, records) in enumerate(every.items()):
        for row, (key, label) in enumerate((("cls/Acc", "accuracy, %"), (NLL, "NLL at one temperature"))):
            axis = axes[row][column]
            for name, (colour, rows) in lines.items():
                points = [
                    (records.mean(one, "cost"), value * (100 if row == 0 else 1))
                    for one in rows
                    if (value := records.mean(one, key)) is not None
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=name)
            axis.grid(alpha=0.25)
            dense = records.mean(DENSE, key)
            if dense is not None:  # what is far off would hide the rest
                dense *= 100 if row == 0 else 1
                axis.set_ylim(*((dense - 12, dense + 3) if row == 0 else (0.8 * dense, 1.8 * dense)))
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
