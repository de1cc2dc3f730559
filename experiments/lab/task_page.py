"""The page of every task, from its record; what it says is in `tables/every-task.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole

from .page import grid

SAID = Path(__file__).parents[1] / "tables" / "every-task.md"
TITLES = {
    "goemotions": "GoEmotions: 28 labels",
    "stsb": "STS-B: one number",
    "wnut17": "WNUT17: tokens",
}
PERCENT = ("mAP", "F1", "AUROC", "ECE", "Pearson")
FAMILIES = ("trec", "ag-news", "multi30k")


def shown(name: str, value: float | None) -> str:
    """Return a figure as text, rates in percent."""
    if value is None or value != value:
        return "–"
    percent = any(part in name for part in PERCENT)
    return f"{100 * value:.1f}" if percent else f"{value:.3f}"


def main_table(found: Mapping[str, Any]) -> list[str]:
    """Return the figures of a task's rows; bold where told from the single model's, 95 %."""
    names = list(dict.fromkeys(k for row in found["rows"].values() for k in row["figures"]))
    body = []
    for row, record in found["rows"].items():
        cells = [row, f"{record['cost']:.2f}"]
        for name in names:
            text = shown(name, record["figures"].get(name))
            apart = record["differences"].get("single", {}).get(name)
            told = apart is not None and apart[1] * apart[2] > 0
            cells.append(f"**{text}**" if told else text)
        body.append(cells)
    return grid(["row", "cost", *names], body)


def far_table(found: Mapping[str, Any]) -> list[str]:
    """Return AUROC of the far families by uncertainty and by novelty, and false alarms."""
    body = []
    for row, record in found["rows"].items():
        far = record["far"]
        cells = [row]
        for kind in ("uncertainty", "novelty"):
            cells += [shown("AUROC", far.get(f"{name}, {kind}")) for name in FAMILIES]
        body.append([*cells, shown("AUROC", far.get("alarms"))])
    heads = [f"{name}, {kind}" for kind in ("uncertainty", "novelty") for name in FAMILIES]
    return grid(["row", *heads, "false alarms"], body)


def coverage_table(record: Mapping[str, Any]) -> list[str]:
    """Return coverage and sizes over the splits."""
    body = []
    for task, found in record.items():
        for name, values in found.items():
            share, size = values["coverage"], values["size"]
            half = values["texts"] - values["texts"] // 2
            off = 196 * (0.9 * 0.1 / half) ** 0.5
            body.append(
                [
                    f"{TITLES[task].split(':')[0]}: {name}",
                    f"{100 * share[0]:.1f} [{100 * share[1]:.1f}, {100 * share[2]:.1f}]",
                    f"90 ± {off:.1f}",
                    f"{size[0]:.2f} [{size[1]:.2f}, {size[2]:.2f}]",
                    " / ".join(f"{x:.3f}" for x in values.get("ours and MAPIE's", ())) or "–",
                ]
            )
    heads = ["coverage, %", "asked for", "size or width", "ours / MAPIE's, 20 splits"]
    return grid(["task, row, method", *heads], body)


def span_coverage(spans: Mapping[str, Any]) -> list[str]:
    """Say what sets of spans cover, if that was measured."""
    if "coverage" not in spans:
        return []
    found = spans["coverage"]
    share, size = found["coverage"], found["size"]
    half = spans["questions"] - spans["questions"] // 2
    off = 196 * (found["asked"] * (1 - found["asked"]) / half) ** 0.5
    return [
        f"Sets of at most 20 spans over 200 splits: coverage {100 * share[0]:.1f} % "
        f"[{100 * share[1]:.1f}, {100 * share[2]:.1f}], asked for {100 * found['asked']:.0f} ± "
        f"{off:.1f}; {size[0]:.1f} spans [{size[1]:.1f}, {size[2]:.1f}]. The right span is among "
        f"the 20 likeliest of {100 * found['reach']:.1f} % of the questions; a coverage beyond "
        "that is refused.",
        "",
    ]


def page(record: Mapping[str, Any]) -> str:
    """Return the page."""
    setup, _, conclusions = SAID.read_text(encoding="utf-8").partition("<!-- conclusions -->")
    lines = [setup.strip(), ""]
    for task, found in record.get("tasks", {}).items():
        lines += [f"## {TITLES[task]}", "", *main_table(found), "", *far_table(found), ""]
    if record.get("coverage"):
        lines += ["## Coverage over 200 splits", "", *coverage_table(record["coverage"]), ""]
    spans = record.get("spans")
    if spans is not None:
        verdict = "" if spans["F1"] >= 40 else ": **not testable here** (below 40)"
        lines += [
            "## Spans",
            "",
            f"SQuAD and half of XQuAD, tested on {spans['questions']} questions of the other half: "
            f"exact match {spans['EM']:.1f}, F1 {spans['F1']:.1f}{verdict}.",
            "",
            *span_coverage(spans),
        ]
    lines += ["## What it says", "", conclusions.strip(), ""]
    lines += [
        "`python experiments/every_task.py answers`, then `table`, `coverage`, `spans`, `page` · "
        f"[every-task.json](every-task.json) · made at commit {record['commit']}",
        "",
    ]
    return "\n".join(lines)


def write_page(record: Mapping[str, Any], folder: Path) -> None:
    """Write the page."""
    write_whole(folder / "every-task.md", page(record))
