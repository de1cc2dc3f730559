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
    """Return the figures of every draw that is complete, by criterion and pruning ratio."""
    table: dict[tuple[str, float], dict[str, list[float]]] = {}
    rows = {tuple(key.split("/")): row for key, row in record["rows"].items()}
    names = {(name, ratio) for name, ratio, _ in rows if name != "magnitude"}
    for figure in FIGURES:
        whole = [
            draw
            for draw in sorted({draw for _, _, draw in rows})
            if all(figure in rows.get((*key, draw), {}) for key in names)
        ]
        for (name, ratio, draw), row in sorted(rows.items()):
            cell = table.setdefault((name, float(ratio)), {figure: [] for figure in FIGURES})
            if draw in whole and figure in row:
                cell[figure].append(row[figure])
    return table


def page(record: dict[str, Any], table: dict[tuple[str, float], dict[str, list[float]]]) -> str:
    """Return the page."""
    sizes, whole = record["sizes"], record["unpruned"]
    draws = _draws(table, "perplexity")
    ratios = sorted({ratio for _, ratio in table})
    parts = []
    for figure, title in FIGURES.items():
        head = "| | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |"
        rows = [head, "|---" * (len(ratios) + 1) + "|"]
        for name in CRITERIA:
            cells = [table.get((name, ratio), {}).get(figure) for ratio in ratios]
            shown = ["" if not c else _number(figure, c) for c in cells]
            rows.append(f"| {name} | " + " | ".join(shown) + " |")
        unpruned = "" if figure not in whole else f" (unpruned {_number(figure, [whole[figure]])})"
        parts.append(f"**{title.capitalize()}**{unpruned}\n\n" + "\n".join(rows))
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
geometric mean over {draws} draw{"s" if draws > 1 else ""} of calibration data, the tasks are means
over {_draws(table, "arc")}; magnitude looks at no data and has one. The sets are small, to fit one
core: one standard error of a share is up to {share / 2:.0%} (ARC) and
{0.5 / sizes["sst2"] ** 0.5:.0%} (SST-2), so read large differences only.

![Perplexity and agreement by share of heads pruned](llama.png)

## What was found

{_findings(table, ratios)}

## Figures

{chr(10).join(part + chr(10) for part in parts)}"""


def _draws(table: dict[tuple[str, float], dict[str, list[float]]], figure: str) -> int:
    """Return how many draws all criteria that look at data have."""
    return min(len(cell[figure]) for (name, _), cell in table.items() if name != "magnitude")


def _findings(table: dict[tuple[str, float], dict[str, list[float]]], ratios: list[float]) -> str:
    lines = []
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
            f"{sum(wins)} of {len(wins)} draws."
        )
    return "\n".join(lines)


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
