"""The page of a table: question, setup, one table, one picture, conclusions, the full figures.

Prose comes from the table file, figures from its records; nothing is typed twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.tables import NOT_RATES

from .records import PAGES, Records

COLUMNS: dict[str, list[str]] = {
    "accuracy": ["cls/Acc"],
    "NLL raw / scaled": ["cls/NLL", "post/cls/NLL"],
    "ECE raw / scaled": ["cal/ECE", "post/cal/ECE"],
    "error AUROC": ["fail/AUROC"],
    "AUROC seen / unseen": ["ood/seen/mean/AUROC", "ood/unseen/mean/AUROC"],
    "FPR95 seen / unseen": ["ood/seen/mean/FPR95", "ood/unseen/mean/FPR95"],
}
PANELS = {
    "ood/mean/AUROC": "AUROC by MSP, mean over OOD sets\n(points; right is better)",
    "post/cls/NLL": "NLL at one temperature\n(left is better)",
}


def shown(figure: str, value: float | None) -> str:
    """Return a figure as tables show it: rates in percent, the rest with three digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3f}" if figure.rsplit("/", 1)[-1] in NOT_RATES else f"{100 * value:.1f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]


def row_cells(
    records: Records, row: str, columns: Mapping[str, Sequence[str]], name: str
) -> list[str]:
    """Return a row's cells: name, cost, the mean of each figure over draws."""
    cells = [name, f"{records.mean(row, 'cost'):.2f}"]
    for figures in columns.values():
        cells.append(" / ".join(shown(f, records.mean(row, f)) for f in figures))
    return cells


def main_table(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the page's one table; rows that were not run are left out."""
    columns = table.get("columns", COLUMNS)
    if "view" in table:
        head, rows = ["task, row", "cost", *columns], []
        for source, task in table["view"]["tables"].items():
            records = Records.read(source, folder)
            for row in table["view"]["rows"]:
                if records.draws(row):
                    rows.append(row_cells(records, row, columns, f"{task}: {row}"))
        return grid(head, rows)
    records = Records.read(table["name"], folder)
    names = [row["name"] for row in table["rows"] if row.get("shown", True)]
    rows = [row_cells(records, name, columns, name) for name in names if records.draws(name)]
    return grid(["", "cost", *columns], rows)


def draw_picture(table: Mapping[str, Any], folder: Path) -> Path | None:
    """Draw each row's paired difference to the single model, with 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sources = table["view"]["tables"] if "view" in table else {table["name"]: ""}
    names = table["view"]["rows"] if "view" in table else [row["name"] for row in table["rows"]]
    panels: dict[str, str] = table.get("panels", PANELS)
    rows = []
    for source, task in sources.items():
        records = Records.read(source, folder)
        for row in names:
            spans = [records.differences.get((row, "single", figure)) for figure in panels]
            if all(span is not None for span in spans):
                label = f"{task}: {row}" if task else row
                rows.append((f"{label}  {records.mean(row, 'cost'):.2f} x", row, spans))
    if not rows:
        return None
    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 1.3 + 0.27 * len(rows)), sharey=True, squeeze=False
    )
    for place, (axis, (key, title)) in enumerate(zip(axes[0], panels.items(), strict=True)):
        scale = 1 if key.rsplit("/", 1)[-1] in NOT_RATES else 100
        for height, (_, row, spans) in enumerate(rows):
            middle, low, high = (scale * value for value in spans[place][:3])
            colour = "#c0392b" if "hydra" in row.lower() else "#34495e"
            axis.plot([low, high], [height, height], color=colour, alpha=0.5, linewidth=2)
            axis.plot(middle, height, "o", color=colour, markersize=5)
        axis.axvline(0, color="#999", linewidth=0.9)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="x", alpha=0.25)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[0][0].set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8.5)
    axes[0][0].invert_yaxis()
    figure.suptitle("Difference to the single model", fontsize=10)
    figure.tight_layout()
    path = folder / f"{table['name']}.png"
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=80, format="png", metadata={"Software": ""})
    plt.close(figure)
    beside.replace(path)
    return path


def write_page(table: Mapping[str, Any], folder: Path = PAGES) -> Path:
    """Write a table's page."""
    if table.get("kind") == "sweep":
        from .sweeps import sweep_picture, sweep_table

        body, picture = sweep_table(table, folder), sweep_picture(table, folder)
        caption = "Accuracy over the share of pruned heads; bars: the range over calibration draws."
    elif table.get("kind") == "members":
        from .members import examples_table, members_picture

        body = [*main_table(table, folder), "", *examples_table(table, folder)]
        picture = members_picture(table, folder)
        caption = "Digits, corrupted digits and outliers, by the teachers' mutual information."
    elif table.get("kind") == "least-squares":
        from .least_squares_page import least_squares_picture, least_squares_tables

        body, picture = least_squares_tables(table, folder), least_squares_picture(table, folder)
        caption = (
            "Accuracy (up is better) and NLL (down is better) over counted cost; "
            "rings: over the measured time of one text; pale: other hosts."
        )
    else:
        body, picture = main_table(table, folder), draw_picture(table, folder)
        caption = "Paired differences to the single model; bars: 95 % over test examples."
    command = table.get("command", f"python experiments/run.py {table['name']}")
    lines = [f"# {table['title']}", "", table["question"].strip(), "", "## Setup", ""]
    lines += [f"- {line}" for line in table["setup"]]
    lines += ["", "## Figures", "", *body, ""]
    if picture is not None:
        lines += [f"![{caption}]({picture.name})", "", f"*{caption}*", ""]
    if table["conclusions"]:
        lines += ["## What it says", "", *[f"- {line}" for line in table["conclusions"]], ""]
    lines += [f"`{command}` · {_links(table, folder)}", ""]
    path = folder / f"{table['name']}.md"
    write_whole(path, "\n".join(lines))
    return path


def _links(table: Mapping[str, Any], folder: Path) -> str:
    """Link the files with every figure, family, score and draw."""
    names = list(table["view"]["tables"]) if "view" in table else [table["name"]]
    found = []
    for name in names:
        for file in (f"{name}.csv", f"{name}-differences.csv"):
            if (folder / file).exists():
                found.append(f"[{file}]({file})")
    if table.get("kind") == "sweep":
        from .sweeps import commits_of

        commits = commits_of(table["name"], folder)
    else:
        commits = [c for name in names for c in Records.read(name, folder).commits]
    made = f" · made at commit {', '.join(dict.fromkeys(commits))}" if commits else ""
    return "all figures: " + ", ".join(found) + made
