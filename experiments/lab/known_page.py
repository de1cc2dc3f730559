"""The page of novelty's figures, `docs/results/novelty.md`, and its picture, from the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hydra_ensembles._records import write_whole
from hydra_ensembles.errors import DataError
from hydra_ensembles.report import svg as style

from .known_table import RESULTS, ROWS

MISSING = "–"
TITLES = {
    "imagenet": "ImageNet, DeiT-tiny",
    "cifar10": "CIFAR-10, DeiT-tiny at 112 pixels",
    "sst2": "SST-2, MiniLM",
    "clinc150": "CLINC150, MiniLM",
    "digits": "Digits, a small ViT",
}
SHOWN = {"novelty": "Hydra + novelty", "novelty, no labels": "Hydra + novelty, no labels"}
PROSE = """# Novelty against other detectors

`ensemble.fit_novelty_(known)` ([what it computes](../concepts/novelty.md)) beside other detectors,
on the same known data, which no host was trained on. No detector sees an outlier.

- **Hydra** is three members that part in the last two blocks (text: the last), above the single
  model's trunk. **single + novelty** is the same host as one full member. **single student** is one
  model distilled from three hosts, trained as the row `student` of the task's table, but never on
  known data (SST-2: on texts that its teachers were trained on). **Deep Ensemble** is three hosts,
  by their own scores, and by novelty on the mean of their features.
- **Rivals** read the single model. `multi-layer` rows measure at all taps that *single + novelty*
  hears and add up -log p, without weights. `trained statistics` rows are fitted to the host's
  training data, as published. KNN's k is one of 1, 2, 5, 10, 20, 50, by classes that are left out
  of the known data in turn (fewer than five examples per class: clusters); 50 is the published
  one for CIFAR-10's 50,000 images. Other options are pytorch-ood's.
- **What was chosen where.** Novelty's taps, shrinkage and weights were chosen with earlier hosts,
  on the sets in brackets, on proxies and on classes left out of the known data. Figures of the
  other sets were known when the end of the last block joined the taps, and when two classes got no
  class distances. Rivals chose nothing on any set of these tables. Tables that say *usual terms
  only* are older than [terms that join](near.md), than the lower weight of the probability with two
  classes, and than the ridge of held-out distances, which lowers the rate of false alarms with few
  known examples; all three change figures a little. [Near things](near.md) has today's.
- **AUROC** in percent, outliers positive; means over draws of known data. **Bold**: the best of a
  column and every row that a paired bootstrap over examples and draws cannot tell apart from it
  (95 %). An en dash: not computed, because there is no training data, no other host or too little
  known data (ImageNet has no teachers).

HYDRA_DATA names the data. A table: `python experiments/novelty.py features TASK`, then
`python experiments/novelty.py table TASK`. All: `bash experiments/reproduce.sh`.
"""

NOTES = {
    "imagenet": "There is no near set here that the host does not know, and one known image per "
    "class is too few for distances to classes.",
    "cifar10": "",
    "sst2": "With two classes novelty does not use labels. Long movie reviews are near: the same "
    "topic at another length.",
    "clinc150": "Known and test questions are drawn from the validation and test parts together, "
    "which differ.",
    "digits": "All 360 digits that were kept aside are known in each draw of that size.",
}


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def read(task: str) -> dict[str, Any] | None:
    """Read a task's record, None when there is none."""
    path = RESULTS / f"novelty-{task}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "above" not in found:
        raise DataError(
            f"{path.name} is of an earlier form: run `python experiments/novelty.py table {task}`."
        )
    return found


def of_detector(draws: Sequence[Any], name: str, sets: Sequence[str], figure: str) -> list[float]:
    """Return a detector's mean over draws per set."""
    able = [draw[name] for draw in draws if name in draw]
    return [mean([draw[key][figure] for draw in able]) for key in sets]


def columns_of(record: dict[str, Any]) -> list[str]:
    """Return the sets, the families that have any, and FPR95 of the far sets."""
    families = record["families"]
    sets = [name for family in families.values() for name in family]
    kinds = [kind for kind in ("near", "far") if families[kind]]
    return [*sets, *kinds, *(["FPR95 far"] if families["far"] else [])]


def detector_rows(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of every column, of the detectors that all draws have."""
    draws, families = record["detectors"][str(record["usual"])], record["families"]
    found: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        cells = found.setdefault(row, {})
        for column in columns_of(record):
            sets = families.get(column.removeprefix("FPR95 "), [column])
            figure = "FPR95" if column.startswith("FPR95") else "AUROC"
            cells[column] = mean(of_detector(draws, row, sets, figure))
    return found


def best_rows(record: dict[str, Any], column: str, rows: Sequence[str] | None = None) -> list[str]:
    """Return the best of some rows in a column, and those that are not told from it."""
    figures = detector_rows(record)
    among = [row for row in record["rows"] if rows is None or row in rows]
    sign = -1 if column.startswith("FPR95") else 1
    best = max(among, key=lambda row: sign * figures[row][column])
    below = record["above"][column][record["rows"].index(best)]
    return [row for row in among if record["rows"].index(row) not in below]


def detector_table(record: dict[str, Any]) -> str:
    """Return the table of a task."""
    columns, figures = columns_of(record), detector_rows(record)
    seen = record["families"]["chosen on"]
    head = [f"[{name}]" if name in seen else name for name in columns]
    head = [f"**{name}**" if name in ("near", "far") else name for name in head]
    bold = {column: best_rows(record, column) for column in columns}
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for row in ROWS:
        cells = [MISSING] * len(columns)
        if row in figures:
            cells = [
                f"**{figures[row][column]:.1f}**"
                if row in bold[column]
                else f"{figures[row][column]:.1f}"
                for column in columns
            ]
        lines.append(f"| {SHOWN.get(row, row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def losses(record: dict[str, Any]) -> str:
    """Say which rows are told above Hydra's novelty, on sets that chose nothing."""
    rows, figures = record["rows"], detector_rows(record)
    hydra = rows.index("novelty")
    said = []
    for column in columns_of(record):
        if column in record["families"]["chosen on"] or column.startswith("FPR95"):
            continue
        above = [row for row in rows if hydra in record["above"][column][rows.index(row)]]
        above.sort(key=lambda row: -figures[row][column])
        if above:
            named = ", ".join(
                f"{SHOWN.get(row, row)} {figures[row][column]:.1f}" for row in above[:3]
            )
            more = f" and {len(above) - 3} more" if len(above) > 3 else ""
            said.append(f"{column} ({figures['novelty'][column]:.1f}): {named}{more}")
    return "Told above Hydra + novelty: " + ("; ".join(said) if said else "none") + "."


def single_line(record: dict[str, Any]) -> str:
    """Say how one full member with novelty, of the host or of a student, compares with three."""
    said = []
    for who in ("single", "student"):
        apart = record.get(f"{who} less Hydra", {})
        parts = [
            f"{kind} {apart[kind][0]:+.1f} [{apart[kind][1]:+.1f}, {apart[kind][2]:+.1f}]"
            for kind in ("near", "far")
            if kind in apart
        ]
        if parts:
            name = "single student" if who == "student" else who
            said.append(f"{name} + novelty less Hydra + novelty: {', '.join(parts)}.")
    return " ".join(said)


def facts(record: dict[str, Any]) -> str:
    """Say what a table was made of."""
    draws = len(record["detectors"][str(record["usual"])])
    counts = sorted(set(record["neighbours"]))
    student = record.get("student accuracy")
    learnt = "" if student is None else f" (single student {student:.1f})"
    joined = ["and others" in choice for choice in record.get("choices", ())]
    terms = f"Terms joined in {sum(joined)} draws" if joined else "Usual terms only, none chosen"
    return (
        f"Accuracy {record['accuracy']:.1f} %{learnt}. {record['usual']} known examples, {draws} "
        f"draws. KNN's k: {', '.join(map(str, counts))}. {terms}. Commit {record['commit']}."
    )


def alarm_lines(records: dict[str, dict[str, Any]]) -> str:
    """Say what the alarm rate is on fixed test sets, and when known and new data are redrawn."""
    lines = []
    for task, record in records.items():
        size = str(record["usual"])
        fixed, redrawn = record["alarms by size"][size], record["alarms redrawn"][size]
        what = "drawn from the same pool" if task == "clinc150" else "the fixed test set"
        lines.append(
            f"- {TITLES[task]}, {record['usual']} known examples: {what} {mean(fixed):.1f} %; "
            f"known and new data redrawn together {mean(redrawn):.1f} %."
        )
    return "\n".join(lines)


def sizes_table(records: dict[str, dict[str, Any]]) -> str:
    """Return near and far AUROC and false alarms by the number of known examples."""
    lines = [
        "| task | known examples | near | far | false alarms at 5 %: test set | drawn together |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for task, record in records.items():
        for size, draws in record["detectors"].items():
            cells = []
            for kind in ("near", "far"):
                names = record["families"][kind]
                figures = of_detector(draws, "novelty", names, "AUROC") if names else []
                cells.append(f"{mean(figures):.1f}" if figures else "–")
            for rates in (record["alarms by size"][size], record["alarms redrawn"][size]):
                cells.append(f"{mean(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})")
            lines.append(f"| {TITLES[task]} | {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mild_table(records: dict[str, dict[str, Any]]) -> str:
    """Return alarms and accuracy under mild changes."""
    lines = ["| task | change | alarms | accuracy (unchanged) |", "|---|---|---:|---:|"]
    for task, record in records.items():
        draws = record["alarms"]
        base = mean([draw["test"]["accuracy"] for draw in draws])
        for name in draws[0]:
            if name.startswith("mild-"):
                alarms = mean([draw[name]["alarms"] for draw in draws])
                right = draws[0][name]["accuracy"]
                label = name.removeprefix("mild-").replace("-", " ")
                lines.append(
                    f"| {TITLES[task]} | {label} | {alarms:.1f} | {right:.1f} ({base:.1f}) |"
                )
    return "\n".join(lines)


def shift_points(record: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Return lost accuracy (a share of the unchanged), alarms and name of every changed set."""
    draws = record["alarms"]
    base = mean([draw["test"]["accuracy"] for draw in draws])
    points = []
    for name in draws[0]:
        if name != "test":
            alarms = mean([draw[name]["alarms"] for draw in draws])
            points.append((1 - draws[0][name]["accuracy"] / base, alarms, name))
    return points


def harm_lines(records: dict[str, dict[str, Any]]) -> str:
    """Say how many shifts that halve accuracy are caught."""
    lines = []
    for task, record in records.items():
        harmful = [point for point in shift_points(record) if point[0] >= 0.5]
        if harmful:
            caught = [point for point in harmful if point[1] >= 80]
            missed = ", ".join(
                f"{n.removeprefix('shift-')} {a:.0f} %" for _, a, n in harmful if a < 80
            )
            lines.append(
                f"- {TITLES[task]}: {len(harmful)} shifts halve accuracy; {len(caught)} of them "
                f"alarm at 80 % or more, {mean([a for _, a, _ in harmful]):.0f} % on average."
                + (f" Missed: {missed}." if missed else "")
            )
    return "\n".join(lines) or "- No shift here halves accuracy."


def failure_table(records: dict[str, dict[str, Any]]) -> str:
    """Return what 5 % of outliers among the known data do."""
    lines = [
        "| task | outliers among the known | that family: clean, contaminated "
        "| far: clean, contaminated |",
        "|---|---|---:|---:|",
    ]
    for task, record in records.items():
        family, far = record["families"]["chosen on"][0], record["families"]["far"]
        clean = record["detectors"][str(record["usual"])]
        before = of_detector(clean, "novelty, no labels", [family], "AUROC")[0]
        cells = [before, mean([draw[family]["AUROC"] for draw in record["contaminated"]])]
        cells.append(mean(of_detector(clean, "novelty, no labels", far, "AUROC")))
        cells.append(mean([draw[key]["AUROC"] for draw in record["contaminated"] for key in far]))
        lines.append(
            f"| {TITLES[task]} | 5 % {family} | {cells[0]:.1f}, {cells[1]:.1f} "
            f"| {cells[2]:.1f}, {cells[3]:.1f} |"
        )
    return "\n".join(lines)


def left_out(records: dict[str, dict[str, Any]]) -> str:
    """Say how classes that are left out of the known data fare."""
    draws = records.get("imagenet", {}).get("left out")
    if not draws:
        return ""
    names = sorted(draws[0], key=lambda name: -mean([draw.get(name, 50.0) for draw in draws]))
    means = {name: mean([draw[name] for draw in draws if name in draw]) for name in names[:6]}
    shown = ", ".join(f"{SHOWN.get(name, name)} {value:.1f}" for name, value in means.items())
    ours = mean([draw["novelty"] for draw in draws])
    said = (
        "Two CIFAR-10 classes left out of the known data (the host of ImageNet, about 240 labelled "
        "known images of the other eight, the same low-level statistics): "
        f"Hydra + novelty {ours:.1f}; best: {shown}."
    )
    record = read("cifar8")
    if record is None:
        return said
    rows = {row: cells["near"] for row, cells in detector_rows(record).items()}
    shown = ", ".join(
        f"{SHOWN.get(row, row)} {rows[row]:.1f}"
        for row in sorted(rows, key=lambda row: -rows[row])[:6]
    )
    return (
        f"{said}\n\nCats and trucks left out of *training* (`python experiments/run.py finetune "
        f"cifar8 --seeds 0`; {record['usual']:,} labelled known images of the other eight "
        f"classes): Hydra + novelty {rows['novelty']:.1f} ({rows['novelty, no labels']:.1f} "
        f"without labels), single + novelty {rows['single + novelty']:.1f}; best: {shown}. "
        f"Commit {record['commit']}."
    )


def draw_picture(records: dict[str, dict[str, Any]]) -> None:
    """Draw alarms against lost accuracy."""
    with_shifts = {t: r for t, r in records.items() if shift_points(r)}
    ax = style.axes(None, (5.6, 3.8))
    for series, (task, record) in enumerate(with_shifts.items()):
        points = shift_points(record)
        ax.scatter(
            [100 * lost for lost, _, _ in points],
            [alarms for _, alarms, _ in points],
            marker=style.marker(series),
            color=style.colour(series),
            s=22,
            alpha=0.75,
            label=TITLES[task],
        )
    ax.axhline(5, color="grey", linewidth=0.8, linestyle="--")
    ax.set_xlabel("accuracy lost, % of the unchanged")
    ax.set_ylabel("alarms at 5 %, %")
    ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, frameon=False)
    style.save(ax, RESULTS / "novelty-shifts.png")


def write_page() -> None:
    """Write the page and the picture from the records that there are."""
    records = {task: record for task in TITLES if (record := read(task)) is not None}
    parts = [PROSE]
    for task, record in records.items():
        said = " ".join([losses(record), single_line(record), NOTES[task]]).strip()
        parts.append(
            f"## {TITLES[task]}\n\n{facts(record)}\n\n{detector_table(record)}\n\n{said}\n"
        )
    parts.append(
        "## False alarms at 5 %\n\nThe rate is guaranteed for data that are exchangeable with the "
        "known data: on average over draws, up to terms of order 1 / n. A fixed test set is one "
        "draw, and need not be exchangeable with the known data:\n\n"
        f"{alarm_lines(records)}\n"
    )
    parts.append(f"## How many known examples\n\n{sizes_table(records)}\n")
    parts.append(
        "## Alarms under change\n\nMild changes, which should not alarm, in percent:\n\n"
        f"{mild_table(records)}\n\n"
        "All corruptions and severities, alarms against lost accuracy:\n\n"
        f"![Alarm rate against lost accuracy](novelty-shifts.png)\n\n{harm_lines(records)}\n"
    )
    parts.append(
        f"## How it fails\n\n{left_out(records)}\n\n"
        "Known data that contain outliers (AUROC, no labels):\n\n"
        f"{failure_table(records)}\n"
    )
    draw_picture(records)
    write_whole(RESULTS / "novelty.md", "\n".join(parts))
