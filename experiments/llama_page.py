"""The page and the picture of `experiments/llama.py`, from its record alone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import matplotlib as mpl

from hydra_ensembles._records import write_whole

mpl.use("Agg")
import matplotlib.pyplot as plt

PLANNED = 5
"""Draws of calibration data that the command measures by default."""

CRITERIA = ("hies", "his", "entropy", "taylor", "magnitude", "random")
FIGURES = {
    "perplexity": "perplexity of texts",
    "arc": "ARC-Easy accuracy",
    "sst2": "SST-2 accuracy",
    "arc_agreement": "ARC-Easy agreement",
    "sst2_agreement": "SST-2 agreement",
}


def write_page(record_path: Path) -> None:
    """Write `llama.md` and `llama.png` beside the record."""
    record = json.loads(record_path.read_text())
    out = record_path.parent
    table = means(record)
    _draw(record, table, out / "llama.png")
    write_whole(out / "llama.md", page(record, table))


def means(record: dict[str, Any]) -> dict[tuple[str, float], dict[str, list[float]]]:
    """Return the figures by criterion and pruning ratio, of the draws that all criteria have."""
    table: dict[tuple[str, float], dict[str, list[float]]] = {}
    rows = {tuple(key.split("/")): row for key, row in record["rows"].items()}
    for (name, ratio, draw), row in sorted(rows.items()):
        cell = table.setdefault((name, float(ratio)), {figure: [] for figure in FIGURES})
        for figure in FIGURES:
            others = [rows.get((n, ratio, draw), {}) for n in CRITERIA if n != "magnitude"]
            others += [rows.get(("magnitude", ratio, "0"), {})]  # it looks at no data
            if figure in row and all(figure in other for other in others):
                cell[figure].append(row[figure])
    return table


def page(record: dict[str, Any], table: dict[tuple[str, float], dict[str, list[float]]]) -> str:
    """Return the page."""
    sizes, whole = record["sizes"], record["unpruned"]
    ratios = sorted({ratio for _, ratio in table})
    parts = []
    for figure, title in FIGURES.items():
        head = "| | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |"
        rows = [head, "|---" * (len(ratios) + 1) + "|"]
        for name in CRITERIA:
            cells = [table.get((name, ratio), {}).get(figure) for ratio in ratios]
            shown = ["" if not c else _number(figure, c) for c in cells]
            rows.append(f"| {name} | " + " | ".join(shown) + " |")
        draws = [str(len(table["his", ratio][figure])) for ratio in ratios]
        rows.append("| *draws* | " + " | ".join(draws) + " |")
        unpruned = "" if figure not in whole else f" (unpruned {_number(figure, [whole[figure]])})"
        parts.append(f"**{title[0].upper()}{title[1:]}**{unpruned}\n\n" + "\n".join(rows))
    share = 1 / sizes["arc"] ** 0.5
    return f"""# HIES on a real Llama: SmolLM2-135M

Made by one command, which resumes: `python experiments/llama.py --data DATA --work WORK`.

SmolLM2-135M-Instruct (30 layers x 9 heads in 3 key-value groups; 4-bit weights, de-quantised) is
scored on {sizes["calibration"]} texts of {sizes["tokens"]} tokens by the loss of the next token.
Heads are ranked over all layers together, gated off in one shot and never fine-tuned; 10, 20, 30
and 50 % are {", ".join(str(round(r * record["heads"])) for r in ratios)} of {record["heads"]}
heads. Perplexity is over {sizes["texts"]} other excerpts of news and movie reviews of
{sizes["text_tokens"]} tokens, ARC-Easy by the likelihood of each answer ({sizes["arc"]}
questions), SST-2 by `PromptClassifier` with the labels' prior taken off ({sizes["sst2"]}
sentences). *Agreement* is the share of answers that are the unpruned model's. Perplexity is the
geometric mean, the others are means over draws of calibration data; the last row of each table says
how many were measured. The sets are small, to fit one core: one standard error of a share is up to
{share / 2:.0%} (ARC) and {0.5 / sizes["sst2"] ** 0.5:.0%} (SST-2), so read large differences only.
{_missing(table, ratios)}
![Perplexity and agreement by share of heads pruned](llama.png)

## What was found

{_findings(table, ratios)}

## Figures

{chr(10).join(part + chr(10) for part in parts)}"""


def _missing(table: dict[tuple[str, float], dict[str, list[float]]], ratios: list[float]) -> str:
    """Say which columns are empty, or have fewer draws than were planned."""
    empty = [f"{r:.0%}" for r in ratios if not table["his", r]["arc"]]
    fewest = min(len(table["his", r]["perplexity"]) for r in ratios)
    parts = []
    if empty:
        parts.append(f"The tasks were not measured at {' and '.join(empty)}.")
    tasks = {r: len(table["his", r]["arc"]) for r in ratios if table["his", r]["arc"]}
    if min(tasks.values(), default=PLANNED) < PLANNED:
        words = ", ".join(f"{draws} at {ratio:.0%}" for ratio, draws in tasks.items())
        parts.append(
            f"Of {PLANNED} draws the tasks were measured in fewer: {words}. `magnitude` looks at "
            "no data and has one."
        )
    if fewest < PLANNED:
        parts.append(
            f"{PLANNED} draws are planned, and the command goes on with those that are missing; "
            "between draws the order of the criteria can change where they are close."
        )
    return " ".join(parts) + "\n" if parts else ""


def _findings(table: dict[tuple[str, float], dict[str, list[float]]], ratios: list[float]) -> str:
    lines, worse = [], []
    for ratio in ratios:
        here = {
            name: geometric_mean(table[name, ratio]["perplexity"])
            for name in CRITERIA
            if (name, ratio) in table
        }
        order = sorted(here, key=lambda name: here[name])
        words = ", ".join(f"{name} {here[name]:,.0f}" for name in order)
        wins = [
            mine < theirs
            for mine, theirs in zip(
                table["hies", ratio]["perplexity"], table["his", ratio]["perplexity"], strict=False
            )
        ]
        lines.append(
            f"- {ratio:.0%} pruned, by perplexity: {words}. HIES is better than HIS in "
            f"{sum(wins)} of {len(wins)} draw{'s' if len(wins) > 1 else ''}."
        )
        worse.append(here["entropy"] > here["random"] and not any(wins))
    if all(worse):
        lines.append(
            "\nKeeping the heads of low entropy alone is worse than keeping random ones, at every "
            "ratio, which suggests that this decoder needs heads that look at many tokens. HIES "
            "mixes that order into HIS, and its perplexity is behind that of HIS at every ratio "
            "here. The paper reports gains over HIS on classifiers from 30 % on; the perplexity "
            "of this language model does not show them."
        )
    return "\n".join([*lines, "", *(_task(table, ratios, figure) for figure in ("arc", "sst2"))])


def _task(
    table: dict[tuple[str, float], dict[str, list[float]]], ratios: list[float], figure: str
) -> str:
    """Say at which ratios HIES answers a task better than HIS does."""
    ahead = []
    for ratio in ratios:
        ours, theirs = (table[name, ratio][figure] for name in ("hies", "his"))
        if ours and theirs and mean(ours) > mean(theirs):
            ahead.append(f"{ratio:.0%} ({mean(ours):.1%} against {mean(theirs):.1%})")
    draws = sorted({len(table["his", ratio][figure]) for ratio in ratios})
    count = " or ".join(map(str, draws))
    where = f"ahead of HIS at {' and '.join(ahead)}" if ahead else "ahead of HIS at no ratio"
    return f"{FIGURES[figure]}: HIES is {where}, in {count} draws."


def _number(figure: str, values: list[float]) -> str:
    if figure == "perplexity":
        return f"{geometric_mean(values):,.0f}"
    return f"{100 * mean(values):.1f}"


def _draw(record: dict[str, Any], table: Any, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in CRITERIA:
        ratios = sorted(ratio for n, ratio in table if n == name)
        for axes, what in ((left, "perplexity"), (right, "sst2_agreement")):
            measured = [ratio for ratio in ratios if table[name, ratio][what]]
            average = geometric_mean if what == "perplexity" else mean
            values = [average(table[name, ratio][what]) for ratio in measured]
            axes.plot([100 * r for r in measured], values, marker="o", ms=3, label=name)
    left.axhline(record["unpruned"]["perplexity"], color="grey", lw=0.8, ls=":")
    left.set(yscale="log", xlabel="heads pruned, %", ylabel="perplexity of texts")
    right.set(xlabel="heads pruned, %", ylabel="SST-2 answers as unpruned")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
