"""What members should be chosen for: likelihood, telling errors, or likelihood under corruption.

    python experiments/choosing.py digits --hosts HOSTS          # docs/results/choosing-digits.json
    python experiments/choosing.py --page                        # docs/results/choosing.md

A draw is 80 % of the calibration data of a host. On each draw members are chosen by `build` (by
selection and at random), and from the selection's pool by a single figure: NLL at the best
temperature, failure AUROC, NLL under corruptions that no test set has.
Everything is judged by `evaluate` on the test data, and compared in pairs over all draws.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.page import grid
from lab.records import PAGES, this_commit
from lab.tasks import Task, open_task
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, fuse
from hydra_ensembles._records import write_whole
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.splits import sample
from hydra_ensembles.evaluation.metrics import negative_log_likelihood
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.mask_pool import make_pool
from hydra_ensembles.search.objectives import placements
from hydra_ensembles.search.trunk_cache import Prefix
from hydra_ensembles.uncertainty import find_temperature, score_logits

MEMBERS, MAX_COST, SHARE = 3, 1.07, 0.8
SHIFTS = {"images": ("shot_noise", "gaussian_blur", "fog"), "texts": ("typos", "drop_words")}
"""Corruptions that choose; the test sets have others."""
FIGURES = {
    "post/cls/NLL": "NLL, scaled",
    "cls/NLL": "NLL, raw",
    "fail/AUROC": "error AUROC",
    "sc/AURC": "AURC",
    "shift/mean/cls/NLL": "NLL under shift",
    "ood/mean/AUROC": "OOD AUROC",
}
Choice = Callable[[dict[str, Tensor], dict[str, Tensor]], float]


def scaled_nll(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> float:
    """Return the NLL at the best temperature."""
    heat = find_temperature(logits["id"], labels["id"]).temperature
    return float(negative_log_likelihood(logits["id"] / heat, labels["id"]).mean())


def missed_errors(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> float:
    """Return 1 - AUROC of wrong answers by MSP."""
    said = logits["id"].softmax(-1).mean(1)
    right = said.argmax(-1) == labels["id"]
    if bool(right.all()) or not bool(right.any()):
        return 0.0
    unsure = score_logits(logits["id"], "msp")
    return 1.0 - float(placements(unsure[right], unsure[~right])[0].mean())


def shifted_nll(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> float:
    """Return the mean NLL over corruptions."""
    names = [name for name in logits if name != "id"]
    losses = [negative_log_likelihood(logits[n], labels[n]).mean() for n in names]
    return float(torch.stack(losses).mean())


CHOICES: dict[str, Choice] = {
    "chosen for NLL": scaled_nll,
    "chosen for failures": missed_errors,
    "chosen for NLL under shift": shifted_nll,
}


WAYS = ("select", "random", *CHOICES)
"""Rows of the page; a record may hold methods that the library no longer has."""


def chosen_for(task: Task, host: Any, known: Any, seed: int) -> dict[str, list[HeadMask]]:
    """Choose members out of one pool by each figure alone: the best first, then the best to add."""
    view = host_model(host)
    first = next(iter(known))
    budget = Budget.of(view, first, MAX_COST)
    layers = budget.branch_layers(MEMBERS)
    pool = list(make_pool(view, layers, size=96, stems=8, seed=seed))
    shifts = {k: corrupted(known, k, severity=3, **look_of(task)) for k in shift_kinds(task)}
    prefix = Prefix(view, {"id": known, **shifts}, labelled=["id", *shifts])
    for layer in range(layers[0]):
        prefix.advance(torch.ones(view.head_counts[layer], dtype=torch.bool))
    outputs = prefix.logits(pool)
    found = {}
    for name, loss in CHOICES.items():
        members: list[int] = []
        while len(members) < MEMBERS:
            able = [i for i in range(len(pool)) if i not in members]
            able = [i for i in able if budget.allows([pool[j] for j in (*members, i)])]
            losses = {
                i: loss({k: v[:, [*members, i]] for k, v in outputs.logits.items()}, outputs.labels)
                for i in able
            }
            members.append(min(able, key=lambda i: (losses[i], i)))
        found[name] = [pool[i] for i in members]
    return found


def look_of(task: Task) -> dict[str, Any]:
    """Return how the task's images are normalised."""
    demo = getattr(task, "_demo", None)
    return {} if demo is None else {"mean": demo.mean, "std": demo.std}


def shift_kinds(task: Task) -> Sequence[str]:
    """Return the corruptions that choose."""
    return SHIFTS["texts" if hasattr(task, "tokenizer") else "images"]


def one_draw(task: Task, seed: int, draw: int) -> dict[str, Any]:
    """Choose members in every way on one draw; return results by way, and seconds."""
    host = task.host(seed)
    known = sample(task.calibration, round(SHARE * task.calibration.count), seed=draw)
    options: dict[str, Any] = {
        "members": MEMBERS,
        "max_cost": MAX_COST,
        "calibrate": False,
        "novelty": False,
        "score": "msp",
        "seed": draw,
        "progress": False,
    }
    models: dict[str, Any] = {"host": host}
    seconds: dict[str, float] = {}
    for name in ("select", "random"):
        begun = time.process_time()
        models[name] = hydra.build(host, known, method=name, **options)
        seconds[name] = time.process_time() - begun
    for name, masks in chosen_for(task, host, known, draw).items():
        models[name] = fuse(host, masks)
    results = {
        name: hydra.evaluate(
            model,
            task.test,
            ood=task.ood,
            shifts=task.shifts or None,
            score=["msp"],
            temperature=known,
            progress=False,
            name=name,
        )
        for name, model in models.items()
    }
    return {"results": results, "seconds": seconds}


def run(args: argparse.Namespace) -> None:
    """Make the record of a task."""
    task = open_task(args.task, args.data, args.hosts)
    found = [one_draw(task, s, d) for s in args.seeds for d in range(args.draws)]
    ways = list(found[0]["results"])
    by_way = {way: [one["results"][way] for one in found] for way in ways}
    shown = [f for f in FIGURES if f in by_way["host"][0].figures]

    def spans(a: str, b: str) -> dict[str, list[float]]:
        differences = hydra.compare(by_way[a], by_way[b], count=args.resamples)
        return {
            f: [round(v, 5) for v in (d.difference, d.low, d.high)]
            for f, d in differences.items()
            if f in shown
        }

    record = {
        "commit": this_commit(),
        "command": f"python experiments/choosing.py {args.task} "
        f"--seeds {' '.join(map(str, args.seeds))} --draws {args.draws}",
        "hosts": args.seeds,
        "draws": args.draws,
        "seconds": {
            way: round(sum(one["seconds"][way] for one in found) / len(found), 1)
            for way in found[0]["seconds"]
        },
        "means": {
            way: {f: round(sum(r[f] for r in rs) / len(rs), 5) for f in shown}
            for way, rs in by_way.items()
        },
        "against the host": {way: spans(way, "host") for way in ways if way != "host"},
    }
    write_whole(args.out / f"choosing-{args.task}.json", json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def cell(figure: str, span: Sequence[float]) -> str:
    """Return a difference with its interval: rates in points, NLL as it is."""
    scale, digits = (1, 4) if figure.endswith("NLL") else (100, 2)
    middle, low, high = (scale * value for value in span)
    text = f"{middle:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def write_page(folder: Path) -> None:
    """Write the page from the records."""
    lines = [
        "# What members should be chosen for",
        "",
        "Members that nothing has trained are chosen by `build`. For what: likelihood, telling "
        "errors, or likelihood under corruption?",
        "",
    ]
    for path in sorted(folder.glob("choosing-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = path.stem.removeprefix("choosing-")
        hosts, draws = len(record["hosts"]), record["draws"]
        lines += [
            f"## {name}",
            "",
            f"{hosts} host{'s' * (hosts > 1)}, {draws} draws of 80 % of the calibration data each; "
            "three members, at most 1.07 x. Differences to the plain host on the test data, with "
            "95 % paired intervals; bold where zero is outside. NLL: lower is better.",
            "",
        ]
        shown = [f for f in FIGURES if f in record["means"]["host"]]
        rows = [
            ["the host itself"]
            + [
                f"{record['means']['host'][f]:.4f}"
                if f.endswith("NLL")
                else f"{100 * record['means']['host'][f]:.2f}"
                for f in shown
            ]
        ]
        for way in (w for w in WAYS if w in record["against the host"]):
            spans = record["against the host"][way]
            rows.append(
                [f"`{way}`" if " " not in way else way, *(cell(f, spans[f]) for f in shown)]
            )
        lines += [*grid(["", *(FIGURES[f] for f in shown)], rows), ""]
        seconds = record["seconds"]
        took = ", ".join(f"`{way}` {seconds[way]} s" for way in WAYS if way in seconds)
        lines += [
            f"Processor time of a `build`: {took}.",
            "",
            f"`{record['command']}` · [{path.name}]({path.name}) · made at commit "
            f"{record['commit']}",
            "",
        ]
    said = folder.parent.parent / "experiments" / "tables" / "choosing.md"
    if said.exists():
        lines += ["## What it says", "", said.read_text(encoding="utf-8").strip(), ""]
    write_whole(folder / "choosing.md", "\n".join(lines))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", nargs="?", help="a task of the tables; leave out with --page")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--out", type=Path, default=PAGES)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if not args.page:
        run(args)
    write_page(args.out)


if __name__ == "__main__":
    plainly(main)
