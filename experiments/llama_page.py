"""The page and the picture of `experiments/llama.py`, from its record alone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
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
    """Return the figures of every draw, by criterion and pruning ratio."""
    table: dict[tuple[str, float], dict[str, list[float]]] = {}
    for key, row in record["rows"].items():
        name, ratio, _ = key.split("/")
        cell = table.setdefault((name, float(ratio)), {figure: [] for figure in FIGURES})
        for figure in set(FIGURES) & set(row):
            cell[figure].append(row[figure])
    return table


def page(record: dict[str, Any], table: dict[tuple[str, float], dict[str, list[float]]]) -> str:
    """Return the page."""
    sizes, whole = record["sizes"], record["unpruned"]
    draws = max(len(cell["arc"]) for cell in table.values())
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
sentences). *Agreement* is the share of answers that are the unpruned model's. Means over {draws}
draw{"s" if draws > 1 else ""} of calibration data. The sets are small, to fit one core: one
standard error of a share is up to {share / 2:.0%} (ARC) and {0.5 / sizes["sst2"] ** 0.5:.0%}
(SST-2), so read large differences only.

![Perplexity and agreement by share of heads pruned](llama.png)

## What was found

{_findings(table, ratios)}

## Figures

{chr(10).join(part + chr(10) for part in parts)}"""


def _findings(table: dict[tuple[str, float], dict[str, list[float]]], ratios: list[float]) -> str:
    lines = []
    for ratio in ratios:
        here = {n: mean(table[n, ratio]["perplexity"]) for n in CRITERIA if (n, ratio) in table}
        order = sorted(here, key=lambda name: here[name])
        words = ", ".join(f"{name} {here[name]:,.0f}" for name in order)
        lines.append(f"- {ratio:.0%} pruned, by perplexity: {words}.")
    return "\n".join(lines)


def _number(figure: str, values: list[float]) -> str:
    if figure == "perplexity":
        return f"{mean(values):,.0f}"
    return f"{100 * mean(values):.1f}"


def _draw(record: dict[str, Any], table: Any, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in CRITERIA:
        ratios = sorted(ratio for n, ratio in table if n == name)
        for axes, what in ((left, "perplexity"), (right, "sst2_agreement")):
            values = [mean(table[name, ratio][what]) for ratio in ratios]
            axes.plot([100 * r for r in ratios], values, marker="o", ms=3, label=name)
    left.axhline(record["unpruned"]["perplexity"], color="grey", lw=0.8, ls=":")
    left.set(yscale="log", xlabel="heads pruned, %", ylabel="perplexity of texts")
    right.set(xlabel="heads pruned, %", ylabel="SST-2 answers as unpruned")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
