"""Write docs/results.md: python experiments/results_page.py

Tables come from `table_<name>.json` (see tables.py), conclusions from `conclusions_<name>.md`,
pictures go to docs/assets/results. A table that was not made yet is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measured_rows
from tables import LOWER_IS_BETTER, RESULTS, over_draws, read

from hydra_ensembles._records import write_whole

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "assets" / "results"
NAMES = ("text", "imagenet", "cifar10", "zeroshot")
BASE = (("accuracy", "accuracy", 1), ("nll", "NLL", 3), ("ece", "ECE", 1), ("aurc", "AURC", 2))
INTRO = """# Results on real models and data

Every table is made by the command above it; running it again with the same seed gives the same
figures. All rows of a table are judged on the same test examples, by the same scores, raw and after
one temperature that is fitted for every row in the same way. Test data takes no part in a search or
a training; where people had seen test figures while a method was made, the conclusions say so.

- **Cost** is counted multiply-adds relative to the plain single model.
- **Measured** is time relative to the plain single model, batch 1 / batch 8: the median of paired
  ratios of one interleaved run on one thread of an otherwise idle machine, with 95 % intervals
  below each table. Time depends on shapes and not on weights, so rows of one structure share a
  measurement; a dash was not timed. Other shapes and two threads: [cost page](results/cost.md).
- **AUROC, FPR95** tell outliers (positive) from test examples, mean over the sets of a group:
  *seen* are new examples of a family of which the search had others, *unseen* are families that it
  never met.
- **±** is half of the 95 % interval over draws of validation data (or of training); figures without
  it have one draw. Intervals over test examples (200 paired resamples) are in the tables of
  differences; **bold** there means that the interval leaves zero out on the better side.
- *M* is the number of members; `M=1` is the best single pruned model of the same search.

"""


def mean_cell(row: dict[str, Any], kind: str, figure: str, digits: int) -> str:
    """Say the mean over draws, and half of its interval where there are several."""
    values = [draw[kind][figure] for draw in row["draws"] if draw[kind].get(figure) is not None]
    if not values:
        return "-"
    mean, half = over_draws(values)
    plain = math.isnan(half) or half < 0.5 * 10**-digits
    return f"{mean:.{digits}f}" if plain else f"{mean:.{digits}f} ± {half:.{digits}f}"


def columns_of(record: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return (figure, title, digits) of the main columns that a record has."""
    found = list(BASE)
    for group in ("seen", "unseen", "all"):
        if record["families"].get(group) or (group == "all" and len(record["families"]) > 1):
            for score, said in (("msp", "MSP"), ("energy", "energy")):
                for figure in ("AUROC", "FPR95"):
                    found.append((f"{group}/{score}/{figure}", f"{group} {figure} {said}", 1))
    have = record["rows"][0]["draws"][0]["raw"]
    return [column for column in found if column[0] in have]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)] + [""]


def main_table(record: dict[str, Any], kind: str) -> list[str]:
    """Return all rows of a table."""
    columns, measured = columns_of(record), measured_rows.read()
    rows = [
        [row["name"], f"{row['cost']:.3f}"]
        + [measured_rows.cell(measured, record["name"], row["name"])]
        + [mean_cell(row, kind, figure, digits) for figure, _, digits in columns]
        for row in record["rows"]
    ]
    return grid(["row", "cost", "measured", *[title for _, title, _ in columns]], rows)


def measured_times(record: dict[str, Any]) -> list[str]:
    """Return what was timed: ratios with intervals, and the command."""
    found = measured_rows.read().get(record["name"])
    if found is None:
        return []
    facts = found["settings"]
    said = (
        f"`{found['command']}`: {facts['dtype']}, threads: {facts['threads']}, torch "
        f"{facts['torch']}; members are those of the draw whose masks count dearest. Counted on "
        "the timed examples."
    )
    head = ["structure", "counted", "batch 1 [95 %]", "batch 8 [95 %]", "rounds", "also"]
    return [said, "", *grid(head, measured_rows.lines(found, record))]


def differences(record: dict[str, Any], kind: str, other: str = "single") -> list[str]:
    """Return every row's paired differences to another row, with 95 % intervals."""
    columns = columns_of(record)

    def cell(row: dict[str, Any], figure: str, digits: int) -> str:
        found = row[f"against_{other}"][kind].get(figure)
        if not found or found[0] is None:
            return "-"
        mean, low, high = found
        lower = figure.endswith(LOWER_IS_BETTER)
        better = high < 0 if lower else low > 0
        said = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
        return f"**{said}**" if better else said

    rows = [
        [row["name"], *[cell(row, figure, digits) for figure, _, digits in columns]]
        for row in record["rows"]
        if f"against_{other}" in row
    ]
    return grid(["row", *[title for _, title, _ in columns]], rows) if rows else []


def details(title: str, lines: Sequence[str]) -> list[str]:
    """Fold lines away."""
    if not lines:
        return []
    return [f"<details markdown><summary>{title}</summary>", "", *lines, "</details>", ""]


def by_family(record: dict[str, Any], kind: str) -> list[str]:
    """Return AUROC by MSP of every family, and the shifts."""
    names = [name for group in ("seen", "unseen") for name in record["families"].get(group, [])]
    have = record["rows"][0]["draws"][0][kind]
    columns = [
        (f"{name}/{score}/{figure}", f"{name} {figure} {score}")
        for name in names
        for score in ("msp", "energy")
        for figure in ("AUROC", "FPR95")
        if f"{name}/{score}/{figure}" in have
    ]
    rows = [
        [row["name"], *[mean_cell(row, kind, figure, 1) for figure, _ in columns]]
        for row in record["rows"]
    ]
    return grid(["row", *[title for _, title in columns]], rows)


def others(record: dict[str, Any]) -> list[str]:
    """Return shifted data, diversity and temperatures, raw (and scaled where it says so)."""
    have = record["rows"][0]["draws"][0]["raw"]
    shifts = sorted(key for key in have if key.endswith("/accuracy"))
    head = ["row", "temperature", "disagreement %", "mutual information"]
    head += [f"{key.removesuffix('/accuracy')} {what}" for key in shifts for what in SHIFT_COLUMNS]
    rows = []
    for row in record["rows"]:
        mean, _ = over_draws([draw.get("temperature") or 1.0 for draw in row["draws"]])
        cells = [row["name"], f"{mean:.2f}", mean_cell(row, "raw", "disagreement", 2)]
        cells.append(mean_cell(row, "raw", "mutual_information", 4))
        for key in shifts:
            name = key.removesuffix("/accuracy")
            cells.append(mean_cell(row, "raw", key, 1))
            cells.append(mean_cell(row, "raw", f"{name}/nll", 3))
            cells.append(mean_cell(row, "scaled", f"{name}/nll", 3))
        rows.append(cells)
    return grid(head, rows)


SHIFT_COLUMNS = ("accuracy", "NLL", "NLL scaled")


def sweeps(record: dict[str, Any]) -> list[str]:
    """Return one table a sweep."""
    lines = []
    columns = columns_of(record)
    for name, sweep in record.get("sweeps", {}).items():
        lines += [f"**{name}**" + (f": {sweep['about']}" if sweep.get("about") else ""), ""]
        for kind in ("raw", "scaled"):
            rows = [
                [str(point["x"]), f"{point['cost']:.3f}"]
                + [
                    f"{point[kind][figure]:.{digits}f}" if figure in point[kind] else "-"
                    for figure, _, digits in columns
                ]
                for point in sweep["points"]
                if point.get(kind)
            ]
            if rows:
                lines += grid([f"{sweep['x']} ({kind})", "cost", *[t for _, t, _ in columns]], rows)
    return lines


def paper(record: dict[str, Any]) -> list[str]:
    """Return the published rows."""
    published = record.get("paper") or {}
    if not published:
        return []
    head = sorted({column for row in published.values() for column in row})
    rows = [
        [name, *[str(row.get(column, "-")) for column in head]] for name, row in published.items()
    ]
    said = "Published (arXiv 2510.18358; other hosts, other data: directions may be compared only)"
    return [f"{said}:", "", *grid(["row", *head], rows)]


def frontier(record: dict[str, Any]) -> Path | None:
    """Draw quality against cost: AUROC, FPR95 and NLL of every row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    group = "all" if "all/msp/AUROC" in record["rows"][0]["draws"][0]["raw"] else "unseen"
    panels = [
        (f"{group}/msp/AUROC", "raw", "AUROC, MSP (mean over OOD sets)", "higher is better"),
        (f"{group}/msp/FPR95", "raw", "FPR95, MSP (mean over OOD sets)", "lower is better"),
        ("nll", "raw", "NLL, raw", "lower is better"),
        ("nll", "scaled", "NLL, temperature-scaled", "lower is better"),
    ]
    rows = sorted(record["rows"], key=lambda row: (-row["cost"], row["name"]))
    height = 1.2 + 0.27 * len(rows)
    figure, axes = plt.subplots(1, 4, figsize=(16, height), sharey=True)
    for axis, (key, kind, title, better) in zip(axes, panels, strict=True):
        for place, row in enumerate(rows):
            mean, _ = over_draws([draw[kind][key] for draw in row["draws"]])
            low, high = row["bootstrap"][kind][key]
            ours = "hydra" in row["name"].lower()
            colour = "#c0392b" if ours else "#34495e"
            around = [[max(mean - low, 0)], [max(high - mean, 0)]]
            axis.errorbar(
                mean,
                place,
                xerr=around,
                fmt="o" if ours else "s",
                color=colour,
                ecolor=colour + "50",
            )
            if row["name"] == "single":
                axis.axvline(mean, color="#999", linewidth=0.9, linestyle=":")
        within = sum(row["cost"] > 1.07 for row in rows) - 0.5
        axis.axhline(within, color="#999", linewidth=0.9)
        axis.set_title(f"{title}\n({better})", fontsize=9.5)
        axis.grid(axis="x", alpha=0.25)
    names = [f"{row['name']}  {row['cost']:.2f} x" for row in rows]
    axes[0].set_yticks(range(len(rows)), names, fontsize=8.5)
    figure.suptitle(
        f"{record['title']}: dearest rows below, those within 1.07 x above the line; "
        "dotted: single; bars: 95 % over test examples",
        fontsize=10,
    )
    figure.tight_layout()
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{record['name']}.png"
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=90, format="png")
    plt.close(figure)
    os.replace(beside, path)
    return path


def section(record: dict[str, Any]) -> list[str]:
    """Return one table's part of the page."""
    lines = [f"## {record['title']}", "", f"`{record['command']}`", ""]
    lines += [*(f"- {line}" for line in record["setup"]), ""]
    said = RESULTS / f"conclusions_{record['name']}.md"
    if said.exists():
        lines += ["### What it says", "", said.read_text(encoding="utf-8").strip(), ""]
    lines += ["### Raw", "", *main_table(record, "raw")]
    lines += ["### Temperature-scaled", "", *main_table(record, "scaled")]
    lines += paper(record)
    picture = frontier(record)
    if picture is not None:
        where = picture.relative_to(DOCS).as_posix()
        lines += [f"![Quality against cost: {record['title']}]({where})", ""]
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("Measured time", lambda: measured_times(record)),
        ("Differences to the single model, raw", lambda: differences(record, "raw")),
        ("Differences to the single model, scaled", lambda: differences(record, "scaled")),
        (
            "Differences to Deep Ensembles, raw",
            lambda: differences(record, "raw", "Deep Ensembles"),
        ),
        (
            "Differences to Deep Ensembles, scaled",
            lambda: differences(record, "scaled", "Deep Ensembles"),
        ),
        ("Every family, raw", lambda: by_family(record, "raw")),
        ("Every family, scaled", lambda: by_family(record, "scaled")),
        ("Shifts, diversity, temperatures", lambda: others(record)),
        ("Sweeps", lambda: sweeps(record)),
    ]
    for title, make in parts:
        lines += details(title, make())
    if record.get("notes"):
        lines += ["Notes:", "", *(f"- {note}" for note in record["notes"]), ""]
    return lines


def write() -> Path:
    """Write the page."""
    lines = [INTRO.strip(), ""]
    for name in NAMES:
        record = read(name)
        if record is not None:
            lines += section(record)
    path = DOCS / "results.md"
    write_whole(path, "\n".join(lines).rstrip() + "\n")
    return path


if __name__ == "__main__":
    print(write())
