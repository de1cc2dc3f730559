"""The page and the picture of `experiments/llama.py`, from its record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from lab.page import grid
from torch import Tensor

from hydra_ensembles._records import write_whole

mpl.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"hies": "HIES", "his": "HIS", "random": "random"}


def write_page(record_path: Path) -> None:
    """Write `llama.md` and `llama.png` beside the record."""
    record = json.loads(record_path.read_text())
    _draw(record, record_path.parent / "llama.png")
    write_whole(record_path.parent / "llama.md", page(record))


def rows(record: dict[str, Any], name: str, ratio: str, figure: str) -> list[Tensor]:
    """Return what a criterion's masks of a ratio measured, one entry per draw."""
    found = (record["rows"].get(f"{name}/{ratio}/{draw}", {}) for draw in range(99))
    return [torch.tensor(row[figure]).double() for row in found if figure in row]


def interval(values: Tensor) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the mean over examples."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (1000, len(values)), generator=generator)
    low, high = values[picks].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def made_at(record: dict[str, Any]) -> str:
    """Name the commits whose code measured the record."""
    parts = [record["gemma"], record["unpruned"], *record["rows"].values()]
    return f"Made at commit {', '.join(dict.fromkeys(part['commit'] for part in parts))}."


def page(record: dict[str, Any]) -> str:
    """Return the page."""
    sizes, whole, right = record["sizes"], record["unpruned"], torch.tensor(record["right"])
    ratios = sorted({key.split("/")[1] for key in record["rows"]})
    half = sizes["windows"]

    def perplexity(losses: Any) -> str:
        values = torch.as_tensor(losses).double()
        parts = [values, values[:half], values[half:]]
        return " / ".join(f"{math.exp(part.mean()):,.1f}" for part in parts)

    def accuracy(answers: Any) -> Tensor:
        return (torch.as_tensor(answers) == right).double()

    texts = [["unpruned", *([perplexity(whole["losses"])] * len(ratios))]]
    tasks = [
        ["unpruned", *([f"{100 * accuracy(whole['answers']).mean():.1f} / 100.0"] * len(ratios))]
    ]
    for name, told in NAMES.items():
        found = {ratio: rows(record, name, ratio, "losses") for ratio in ratios}
        texts.append(
            [
                told,
                *(perplexity(torch.stack(found[r]).mean(0)) if found[r] else "–" for r in ratios),
            ]
        )
        cells = []
        for ratio in ratios:
            answers = rows(record, name, ratio, "answers")
            same = [(a == torch.tensor(whole["answers"])).double().mean() for a in answers]
            cells.append(
                f"{100 * accuracy(answers[0]).mean():.1f} / {100 * same[0]:.1f}" if answers else "–"
            )
        tasks.append([told, *cells])
    gaps = []
    for ratio in ratios:
        pairs = list(
            zip(*(rows(record, n, ratio, "losses") for n in ("hies", "his")), strict=False)
        )
        if pairs:
            gap = torch.stack([one - other for one, other in pairs]).mean(0)
            low, high = interval(gap)
            gaps.append(
                f"- {float(ratio):.0%} pruned: the log-perplexity of HIES minus that of HIS is "
                f"{gap.mean():+.2f} [{low:+.2f}, {high:+.2f}] (draws: {len(pairs)})."
            )
    draws = max(len(rows(record, "his", ratio, "losses")) for ratio in ratios)
    head = ["", *(f"{float(ratio):.0%}" for ratio in ratios)]
    return "\n".join(
        [
            "# HIES on a real Llama: SmolLM2-135M",
            "",
            f"`python experiments/llama.py`, which resumes. {made_at(record)}",
            "",
            "SmolLM2-135M-Instruct (30 layers x 9 heads in 3 key-value groups; 4-bit weights, "
            f"de-quantised) is scored on {sizes['calibration']} texts of {sizes['tokens']} tokens "
            "by the loss of the next token. Heads are ranked over all layers together, gated off "
            f"in one shot, not fine-tuned; {record['heads']} heads in all. HIES has alpha 0.5.",
            "",
            "## Perplexity",
            "",
            f"All / AG News / XQuAD: {2 * half * sizes['window']:,} tokens in windows of "
            f"{sizes['window']}; mean log-perplexity; draws of the calibration texts: {draws}. "
            f"Gemma-3-270m (base, 4-bit), unpruned, on its own tokens: "
            f"{perplexity(record['gemma']['losses'])}.",
            "",
            *grid(head, texts),
            "",
            *gaps,
            "",
            "Intervals are over windows.",
            "",
            "![Perplexity by share of heads pruned](llama.png)",
            "",
            "## ARC-Easy",
            "",
            f"Accuracy / agreement with the unpruned model, {sizes['questions']} questions by the "
            "likelihood of each answer, first draw; one standard error is up to "
            f"{50 / sizes['questions'] ** 0.5:.1f} points.",
            "",
            *grid(head, tasks),
            "",
            "The paper reports gains of HIES over HIS on classifiers from 30 % on.",
            "",
        ]
    )


def _draw(record: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    ratios = sorted({key.split("/")[1] for key in record["rows"]})
    start = math.exp(sum(record["unpruned"]["losses"]) / len(record["unpruned"]["losses"]))
    for name, told in NAMES.items():
        points = {0.0: start}
        for ratio in ratios:
            found = rows(record, name, ratio, "losses")
            if found:
                points[100 * float(ratio)] = math.exp(torch.stack(found).mean())
        axes.plot(list(points), list(points.values()), marker="o", ms=3, label=told)
    axes.set(yscale="log", xlabel="heads pruned, %", ylabel="perplexity of texts")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
