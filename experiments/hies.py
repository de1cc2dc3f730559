"""HIES on its headline task: CoLA and SST-2 pruned by six criteria; makes docs/results/hies.md.

    python experiments/hies.py --data DATA --hosts HOSTS --cache CACHE    # resumes, mask by mask
    python experiments/hies.py --page                                     # the page only

MiniLM's heads are scored on 32 examples, ranked over all layers together, pruned in one shot and
never fine-tuned; five draws of the examples. From that base the number of examples, the entropy and
alpha are varied one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.page import grid
from lab.records import this_commit
from lab.tasks import open_task
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.criteria import HeadImportanceEntropy
from hydra_ensembles.criteria.attention_entropy import AttentionEntropy
from hydra_ensembles.data.splits import sample
from hydra_ensembles.evaluation.intervals import Interval
from hydra_ensembles.research import prune_sweep
from hydra_ensembles.research.pruning_sweep_results import PruneSweep, unpack

OUT = Path(__file__).parents[1] / "docs" / "results"
TASKS = {"cola": "CoLA", "sst2": "SST-2"}
RATIOS = (0.1, 0.3, 0.5)
DRAWS = 5
AUTO = HeadImportanceEntropy("auto", alphas=(0.0, 0.25, 0.5, 0.75, 1.0), ratios=(0.3, 0.5))
BASE = ("random", "magnitude", "his", "entropy", "hies", AUTO)
OTHERS = {
    f"HIES with {name}": HeadImportanceEntropy(entropy=AttentionEntropy(kind=kind))
    for name, kind in {
        "Renyi entropy of order 2": "renyi",
        "Tsallis entropy of order 2": "tsallis",
        "min-entropy": "min",
    }.items()
} | {f"HIES, alpha {alpha}": HeadImportanceEntropy(alpha) for alpha in (0.25, 0.75)}
COUNTS = (16, 64, 128)
VARIED = RATIOS[1:]
"""Ratios of the variations."""

MOST = 600
"""Test examples; of a larger set (SST-2: 872) every other one is taken."""

FIGURES = {"accuracy": "right", "Matthews": "right", "stability": "same"}


def sweeps(task: Any, work: Path) -> dict[str, PruneSweep]:
    """Sweep the base, then every variation; all share the masks that were measured."""
    test = tested(task)
    shared: dict[str, Any] = {
        "calibration": task.calibration,
        "draws": DRAWS,
        "held_out": list(sample(task.held_out, 200, seed=0)),
        "folder": work,
    }
    host = task.host(0)
    found = {"base": prune_sweep(host, test, criteria=BASE, ratios=RATIOS, **shared)}
    shared["ratios"] = VARIED
    found["varied"] = prune_sweep(host, test, criteria=["his", *OTHERS.values()], **shared)
    for count in COUNTS:
        found[str(count)] = prune_sweep(
            host, test, criteria=["his", "hies"], calibration_examples=count, **shared
        )
    return found


def tested(task: Any) -> list[Any]:
    """Return the test batches: all, or every other example of a large set."""
    few = task.test.count <= MOST
    return list(task.test if few else task.test.subset(range(0, task.test.count, 2)))


def matthews(right: Tensor, labels: Tensor) -> Tensor:
    """Return Matthews' correlation of two-class answers from which of them are right `[..., N]`."""
    positive = labels == 1
    tp, tn = (right & positive).sum(-1).double(), (right & ~positive).sum(-1).double()
    fn, fp = positive.sum(-1) - tp, (~positive).sum(-1) - tn
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)).sqrt()
    return torch.where(scale > 0, (tp * tn - fp * fn) / scale.clamp_min(1e-12), 0.0)


def figure(hits: Tensor, labels: Tensor, name: str) -> Tensor:
    """Return a figure of flags `[..., N]`."""
    return matthews(hits, labels) if name == "Matthews" else hits.double().mean(-1)


def difference(one: Tensor, other: Tensor, labels: Tensor, name: str) -> Interval:
    """Return the mean difference over draws, with a bootstrap over draws and examples at once."""
    generator = torch.Generator().manual_seed(0)
    draws, examples = one.shape
    gaps = []
    for _ in range(1000):
        rows = torch.randint(draws, (draws, 1), generator=generator)
        columns = torch.randint(examples, (examples,), generator=generator)
        pair = [figure(hits[rows, columns], labels[columns], name).mean() for hits in (one, other)]
        gaps.append(pair[0] - pair[1])
    spread = torch.stack(gaps).quantile(torch.tensor([0.025, 0.975]).double())
    mean = figure(one, labels, name).mean() - figure(other, labels, name).mean()
    return Interval(float(mean), float(spread[0]), float(spread[1]))


def measure(args: argparse.Namespace) -> None:
    """Measure both tasks and write the record."""
    record: dict[str, Any] = {}
    for name, title in TASKS.items():
        task = open_task(name, args.data, args.hosts)
        work = Path(args.cache) / "hies" / name
        found = sweeps(task, work)
        labels = torch.cat([batch["labels"] for batch in tested(task)])
        base = found["base"]
        names = {AUTO.label: "HIES, alpha chosen", "hies": "HIES", "his": "HIS"}
        rows = [(names.get(c, c), base, c) for c in base.criteria]
        rows += [(told, found["varied"], criterion.label) for told, criterion in OTHERS.items()]
        rows += [
            (f"{told}, {count} examples", found[str(count)], c)
            for count in COUNTS
            for c, told in (("his", "HIS"), ("hies", "HIES"))
        ]
        record[title] = {
            "commit": this_commit(),
            "examples": len(labels),
            "unpruned": {"accuracy": base.baseline["cls/Acc"]},
            "alphas": base.score_names[AUTO.label],
            "rows": {
                told: {str(ratio): cell(sweep, c, ratio, labels) for ratio in sweep.ratios}
                for told, sweep, c in rows
            },
        }
        whole = prune_sweep(
            task.host(0), tested(task), criteria=["magnitude"], ratios=[0.0], draws=1,
            calibration=task.calibration,
        )  # fmt: skip
        right = unpack(whole.at("magnitude", 0.0)[0].right, len(labels))
        record[title]["unpruned"]["Matthews"] = float(matthews(right, labels))
        write_whole(OUT / "hies.json", json.dumps(record, indent=1) + "\n")


def cell(sweep: PruneSweep, criterion: str, ratio: float, labels: Tensor) -> dict[str, Any]:
    """Return means over draws, and what a criterion is ahead of HIS on the same draws."""

    def hits(label: str, side: str) -> Tensor:
        return torch.stack([unpack(getattr(o, side), len(labels)) for o in sweep.at(label, ratio)])

    found = {}
    for name, side in FIGURES.items():
        flags = hits(criterion, side)
        gap = difference(flags, hits("his", side), labels, name)
        found[name] = {
            "mean": float(figure(flags, labels, name).mean()),
            "ahead of HIS": [gap.value, gap.low, gap.high],
        }
    return found


def shown(entry: dict[str, Any] | None, *, gap: bool) -> str:
    """Return a figure in percent; with `gap` what it is ahead of HIS, starred if told apart."""
    if entry is None:
        return "–"
    if not gap:
        return f"{100 * entry['mean']:.1f}"
    value, low, high = (100 * part for part in entry["ahead of HIS"])
    star = "\\*" if low > 0 or high < 0 else ""
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{star}"


def page(record: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        "# HIES on CoLA and SST-2",
        "Does head importance joined with attention entropy (HIES, arXiv 2510.13832) prune better "
        "than head importance (HIS)? The paper's headlines are of CoLA at 50 % pruned: +15.2 % "
        "quality and 2.04 x stability.",
        "MiniLM-L6 (72 heads), fine-tuned (`recipes.yaml`, seed 0). Heads are scored on 32 "
        "examples, ranked over all layers together, pruned in one shot and never fine-tuned; means "
        "over five "
        "draws of the 32. *Stability* is the share of examples whose predicted class is the "
        "unpruned model's. *HIES* has alpha 0.5; with *alpha chosen* it is the best of five on 200 "
        "held-out sentences. Differences are to HIS on the same draws, with a 95 % bootstrap "
        "interval over draws and examples; a star marks those told apart from 0.",
    ]
    for title, task in record.items():
        whole = task["unpruned"]
        parts.append(
            f"## {title}\n\n{task['examples']} test sentences; unpruned: accuracy "
            f"{100 * whole['accuracy']:.1f}, Matthews correlation {100 * whole['Matthews']:.1f}. "
            f"Alpha chosen: {', '.join(task['alphas'])}. Made at commit {task['commit']}."
        )
        for name in FIGURES:
            head = [name, *(f"{float(r):.0%}" for r in RATIOS)]
            head += [f"{float(r):.0%}, ahead of HIS" for r in VARIED]
            rows = []
            for told, cells in task["rows"].items():
                means = [shown(cells.get(str(r), {}).get(name), gap=False) for r in RATIOS]
                gaps = [shown(cells[str(r)][name], gap=True) for r in VARIED]
                rows.append([told, *means, *([""] * len(gaps) if told.startswith("HIS") else gaps)])
            parts.append("\n".join(grid(head, rows)))
    parts.append("`python experiments/hies.py` · all figures: [hies.json](hies.json)")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--page", action="store_true", help="write the page only")
    args = parser.parse_args()
    if not args.page:
        measure(args)
    write_whole(OUT / "hies.md", page(json.loads((OUT / "hies.json").read_text())))


if __name__ == "__main__":
    plainly(main)
