"""Write docs/results/circuits.md from the results of `select_members.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGE = ROOT / "docs" / "results" / "circuits.md"
NOTES = Path(__file__).parent / "results" / "select_notes.md"
TITLES = {
    "text": "MiniLM-L6, SST-2",
    "image": "DeiT-tiny, ImageNet-1k",
    "cifar10": "DeiT-tiny at 96 x 96, CIFAR-10",
}


def cell(values: list[float], digits: int = 1, sign: bool = False) -> str:
    """Say mean ± half interval."""
    mean, half = tables.over_draws(values)
    if math.isnan(half):  # one draw has no interval
        return f"{mean:{'+' if sign else ''}.{digits}f}"
    return f"{mean:{'+' if sign else ''}.{digits}f} ± {half:.{digits}f}"


def family_mean(row: dict[str, Any], kind: str, names: list[str], score: str, figure: str) -> float:
    """Average a figure over families; texture classes are one family."""
    return sum(row[kind][f"{name}/{score}"][figure] for name in names) / len(names)


def table(record: dict[str, Any], group: str, kind: str) -> list[str]:
    """Return the rows of one table: figures and their gains over the single model."""
    lines = [
        "| row | cost | accuracy | NLL | ECE | AUROC MSP | FPR95 MSP | AUROC energy | FPR95 energy "
        "| gain AUROC MSP | gain AUROC energy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    draws = record["draws"]
    for name in draws[0]["rows"]:

        def over(figure: Callable[[dict[str, Any], dict[str, Any]], float]) -> list[float]:
            return [figure(d["rows"][name], d) for d in draws]  # noqa: B023

        cells = [f"{max(d['rows'][name]['cost'] for d in draws):.3f}"]
        for figure, digits in (("accuracy", 1), ("nll", 3), ("ece", 1)):
            cells.append(cell(over(lambda r, d, f=figure: r[kind][f]), digits))
        for score in ("msp", "energy"):
            for figure in ("AUROC", "FPR95"):
                cells.append(
                    cell(over(lambda r, d, s=score, f=figure: family_mean(r, kind, d[group], s, f)))
                )
        for score in ("msp", "energy"):
            cells.append(
                cell(
                    over(
                        lambda r, d, s=score: (
                            family_mean(r, kind, d[group], s, "AUROC")
                            - family_mean(d["rows"]["single"], kind, d[group], s, "AUROC")
                        )
                    ),
                    2,
                    True,
                )
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def gains(record: dict[str, Any]) -> list[str]:
    """Return each row's gains over the single model with intervals: the claims at a glance."""
    draws = record["draws"]
    columns: dict[str, Callable[[dict[str, Any], dict[str, Any]], float]] = {
        "accuracy": lambda r, d: r["raw"]["accuracy"],
        "NLL raw": lambda r, d: r["raw"]["nll"],
        "NLL scaled": lambda r, d: r["scaled"]["nll"],
    }
    for group in ("unseen", "seen"):
        for score, figure in (("msp", "AUROC"), ("energy", "AUROC"), ("msp", "FPR95")):
            title = f"{group} {figure} {'MSP' if score == 'msp' else score}"
            columns[title] = lambda r, d, g=group, s=score, f=figure: family_mean(  # type: ignore[misc]
                r, "raw", d[g], s, f
            )
    lines = ["| row | " + " | ".join(columns) + " | worst unseen AUROC MSP |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name in draws[0]["rows"]:
        cells = []
        for title, figure_of in columns.items():
            differences = [
                figure_of(d["rows"][name], d) - figure_of(d["rows"]["single"], d) for d in draws
            ]
            cells.append(cell(differences, 3 if "NLL" in title else 2, True))
        worst = min(
            sum(
                d["rows"][name]["raw"][f"{family}/msp"]["AUROC"]
                - d["rows"]["single"]["raw"][f"{family}/msp"]["AUROC"]
                for d in draws
            )
            / len(draws)
            for family in draws[0]["unseen"]
        )
        if name != "single":
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {worst:+.2f} |")
    return lines


def by_family(record: dict[str, Any], row: str) -> list[str]:
    """Return the gains of one row over the single model, family by family."""
    draws = record["draws"]
    names = sorted({name for d in draws for name in (*d["seen"], *d["unseen"])})
    lines = ["| family | seen in search | MSP raw | MSP scaled | energy raw | energy scaled |"]
    lines.append("|---|---|---|---|---|---|")
    for name in names:
        cells = []
        for score in ("msp", "energy"):
            for kind in ("raw", "scaled"):
                gains = [
                    d["rows"][row][kind][f"{name}/{score}"]["AUROC"]
                    - d["rows"]["single"][kind][f"{name}/{score}"]["AUROC"]
                    for d in draws
                    if name in (*d["seen"], *d["unseen"])
                ]
                cells.append(cell(gains, 2, True))
        seen = "yes" if any(name in d["seen"] for d in draws) else "no"
        lines.append(f"| {name} | {seen} | " + " | ".join(cells) + " |")
    return lines


def write() -> None:
    """Write the page."""
    lines = [
        "# Members by selection, circuits, Taylor and chance",
        "",
        "Nothing is trained. Mean ± half of the 95 % interval over draws of validation data; test "
        "data is never read by a search. Texture classes that a draw did not search on are the "
        "*seen* family (other classes of it); everything in *unseen* is of a kind that no search "
        "saw. `select M=1` is the best single pruned model of the same search. The cost is counted "
        "multiply-adds relative to the plain model (the largest over draws); temperatures of the "
        "scaled tables are fitted the same way for every row, the single model included.",
        "",
    ]
    if NOTES.exists():
        lines += [NOTES.read_text().rstrip(), ""]
    for task, title in TITLES.items():
        path = RESULTS / f"select_{task}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        lines += [f"## {title}", "", f"`{record['command']}`, {len(record['draws'])} draws.", ""]
        lines += ["### Gains over the single model, raw", "", *gains(record), ""]
        for group, what in (("unseen", "Unseen families"), ("seen", "Seen family")):
            for kind in ("raw", "scaled"):
                how = "raw" if kind == "raw" else "temperature-scaled"
                lines += [f"### {what}, {how}", "", *table(record, group, kind), ""]
        lines += ["### Gains of `select M=3` in AUROC points, family by family", ""]
        lines += [*by_family(record, "select M=3"), ""]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    beside = PAGE.with_name(PAGE.name + ".partial")
    beside.write_text("\n".join(lines), encoding="utf-8")
    beside.replace(PAGE)


if __name__ == "__main__":
    write()
