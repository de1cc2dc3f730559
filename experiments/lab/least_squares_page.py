"""The page on least squares: its tables, what is kept of the gain, and one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .page import grid, shown
from .records import Records

NLL, ACCURACY = "post/cls/NLL", "cls/Acc"
MSP, MI = "ood/mean/AUROC", "ood/mean/mutual-information/AUROC"
DENSE, DEEP = "single", "Deep Ensemble"
AGAIN = "-again"
STATES, STUDENT = "folded, members by states", "folded, student"
RIVALS = [(f"Torch-Pruning 0.5{then}", "pruned to 0.5") for then in ("", ", our refit")]


def least_squares_tables(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the page's tables, then what is kept of the Deep Ensemble's gain, task by task."""
    every = {t: Records.read(source, folder) for source, t in table["view"]["tables"].items()}
    every = {task: records for task, records in every.items() if records.rows}
    lines: list[str] = []
    for part in table["tables"]:
        found = {task: every[task] for task in part["tasks"] if task in every}
        if not found:
            continue
        if "criteria" in part:
            lines += [f"### {part['title']}", "", *_criteria(found, part["criteria"]), ""]
            continue
        if "corrupted" in part:
            lines += [f"### {part['title']}", "", *_corrupted(found, part["corrupted"]), ""]
            continue
        key, other = part["beside"]
        head = ["task, row", "cost", "accuracy", "NLL raw / scaled", "scaled, minus single"]
        head += [f"{'accuracy' if key == ACCURACY else 'scaled'}, minus {other}"]
        rows = [
            _cells(records, task, name, key, other)
            for task, records in found.items()
            for name in part["rows"]
            if records.draws(name)
        ]
        lines += [f"### {part['title']}", "", *grid([*head, "outliers: MSP / MI"], rows), ""]
    return lines + [line for task, records in every.items() for line in _goals(task, records)]


def _cells(records: Records, task: str, name: str, key: str, other: str) -> list[str]:
    """Return a row: figures, and paired differences, bold where the interval excludes 0."""
    several = (records.mean(name, "div/MI") or 0) > 0
    outliers = [shown("AUROC", records.mean(name, MSP))]
    outliers += [shown("AUROC", records.mean(name, MI))] * several
    return [
        f"{task}: {name}",
        f"{records.mean(name, 'cost'):.2f}",
        shown(ACCURACY, records.mean(name, ACCURACY)),
        " / ".join(shown(key, records.mean(name, key)) for key in ("cls/NLL", NLL)),
        _span(records, name, DENSE, NLL),
        _span(records, name, other, key),
        " / ".join(outliers),
    ]


def _span(records: Records, row: str, other: str, key: str) -> str:
    """Return a paired difference, bold where its interval excludes 0; rates in points."""
    span = records.differences.get((row, other, key))
    if span is None:
        return "–"
    scale, digits = (1, 3) if key.endswith("NLL") else (100, 1)
    value, low, high = (f"{scale * one:+.{digits}f}" for one in span[:3])
    text = f"{value} [{low}, {high}]"
    return f"**{text}**" if span[1] > 0 or span[2] < 0 else text


def _criteria(found: Mapping[str, Records], names: Mapping[str, str]) -> list[str]:
    """Return a table of criteria, without refit beside with it: accuracy and NLL."""
    rows = []
    for task, records in found.items():
        for title, row in names.items():
            pair = [f"{row}, no refit", row]
            if records.draws(pair[0]) or records.draws(pair[1]):
                each = [[shown(k, records.mean(one, k)) for k in (ACCURACY, NLL)] for one in pair]
                rows.append([f"{task}: {title}", *(" / ".join(one) for one in each)])
    return grid(["task, criterion", "no refit: accuracy / NLL", "refit: accuracy / NLL"], rows)


def _corrupted(found: Mapping[str, Records], names: Sequence[str]) -> list[str]:
    """Return a table of figures on corrupted test data, before any temperature."""
    head = ["task, row", "accuracy", "ECE", "NLL", "minus single", "minus Deep Ensemble"]
    keys = [f"shift/mean/{key}" for key in (ACCURACY, "cal/ECE", "cls/NLL")]
    rows = [
        [
            f"{task}: {name}",
            *(shown(key, records.mean(name, key)) for key in keys),
            *(_span(records, name, other, keys[-1]) for other in (DENSE, DEEP)),
        ]
        for task, records in found.items()
        for name in names
        if records.mean(name, keys[-1]) is not None
    ]
    return grid(head, rows)


def _goals(task: str, records: Records) -> list[str]:
    """Say what is kept of the Deep Ensemble's gain, and how rivals and outliers compare with it."""
    single, deep = records.mean(DENSE, NLL), records.mean(DEEP, NLL)
    if single is None or deep is None:
        return []
    kept = [
        f"{name} {share:.0%}"
        if (share := (found - single) / (deep - single)) > -1
        else f"{name} none"
        for name in ("soup", STATES, STUDENT)
        if (found := records.mean(name, NLL)) is not None
    ]
    text = f"- {task}: of the Deep Ensemble's gain ({deep - single:+.3f}) are kept by "
    text += f"{', '.join(kept)}."
    if (STUDENT, DEEP, MSP) in records.differences:
        text += f" Outliers, minus the Deep Ensemble: MSP {_span(records, STUDENT, DEEP, MSP)}, "
        text += f"MI of members by states {_span(records, STATES, DEEP, MI)}."
    for row, other in (("trained student", STUDENT), *RIVALS):
        if (row, other, NLL) in records.differences:
            text += f" {row[0].upper()}{row[1:]}, minus *{other}*: NLL "
            text += f"{_span(records, row, other, NLL)}."
    return [text]


LINES = {
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
    "Deep Ensemble": ("#2c3e50", [DEEP]),
    "one host": ("#000000", [DENSE]),
}
MEASURED = {
    "pruned to 0.5": "pruned 0.5",
    "pruned to 0.75": "pruned 0.75",
    "folded, student": "folded",
}
"""Rows whose time was measured on a model of the size of the tables' MiniLM, and its entries."""
LATENCY = Path(__file__).parents[2] / "benchmarks" / "results" / "latency-minilm-least-squares.json"


def measured_costs() -> dict[str, float]:
    """Return the measured cost of some rows: time for one text against the plain host."""
    rows = json.loads(LATENCY.read_text(encoding="utf-8"))["rows"]
    ratios = {row["name"]: row["ratio"]["value"] for row in rows if row["batch_size"] == 1}
    return {row: ratios[entry] for row, entry in MEASURED.items()}


def least_squares_picture(table: Mapping[str, Any], folder: Path) -> Path | None:
    """Draw accuracy and NLL at one temperature over cost, a column per task."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    every = {name: Records.read(name, folder) for name in table["view"]["tables"]}
    again = {name.removesuffix(AGAIN): r for name, r in every.items() if name.endswith(AGAIN)}
    every = {name: records for name, records in every.items() if not name.endswith(AGAIN)}
    every = {name: records for name, records in every.items() if records.rows}
    if not every:
        return None
    figure, axes = plt.subplots(
        2, len(every), figsize=(3.2 * len(every) + 0.6, 5.4), squeeze=False, sharex=True
    )
    figures = {"cls/Acc": ("accuracy, %", 100), NLL: ("NLL at one temperature", 1)}
    for column, (source, records) in enumerate(every.items()):
        title = table["view"]["tables"][source]
        texts = any(text in source for text in ("clinc150", "sst2", "cola"))
        for axis, (key, (label, scale)) in zip(axes[:, column], figures.items(), strict=True):
            rings = measured_costs() if texts else {}
            seen = _draw(axis, records, key, scale, rings)
            if source in again:
                seen += _draw(axis, again[source], key, scale, {}, alpha=0.35)
            low, high = min(seen), max(seen)
            axis.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))
            if column == 0:
                axis.set_ylabel(label)
        axes[0][column].set_title(title, fontsize=10)
        axes[1][column].set_xlabel("cost against one host")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    path = folder / f"{table['name']}.png"
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=100, format="png", metadata={"Software": ""})
    plt.close(figure)
    beside.replace(path)
    return path


def _draw(
    axis: Any,
    records: Records,
    key: str,
    scale: float,
    measured: Mapping[str, float],
    alpha: float = 1.0,
) -> list[float]:
    """Draw one figure of a table: a line per way, rings where the cost is a measured one.

    Returns:
        The values that must be in sight.
    """
    in_sight = []
    for name, (colour, rows) in LINES.items():
        values = {row: records.mean(row, key) for row in rows}
        points = {row: scale * value for row, value in values.items() if value is not None}
        if not points or (len(points) == 1 < len(rows) and DENSE in points):
            continue
        costs, label = [records.mean(row, "cost") for row in points], name if alpha == 1 else None
        style = {"color": colour, "alpha": alpha, "markersize": 4, "label": label}
        axis.plot(costs, list(points.values()), "o-", **style)
        if name != "pruned only":  # what is far off would hide the rest
            in_sight += points.values()
        for row in points.keys() & measured.keys():
            axis.plot(measured[row], points[row], "o", color=colour, markersize=7, fillstyle="none")
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return in_sight
