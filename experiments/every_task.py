"""Every task: `docs/results/every-task.md`.

    python experiments/run.py finetune stsb --data DATA --hosts HOSTS  # wnut17, goemotions, xquad
    python experiments/every_task.py answers --data DATA --hosts HOSTS --cache CACHE
    python experiments/every_task.py table
    python experiments/every_task.py coverage
    python experiments/every_task.py spans
    python experiments/every_task.py page

`answers` runs the models of all rows over all sets, and keeps what they say; a stopped run goes on.
The other steps read these answers. `spans` asks the host of question answering. Answers for sets of
other commands go to `CACHE/sets/TASK.safetensors`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.answers import Store
from lab.other_tasks import HeldTask
from lab.records import PAGES, this_commit
from lab.task_coverage import coverage_of, keep_for_sets, span_figures
from lab.task_figures import TASKS, Said, figures_of, outlier_figures, resamples
from lab.task_page import write_page
from lab.task_rows import MAKERS, SEEDS, Rows
from lab.tasks import open_task

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.intervals import percentiles

AGAINST = ("single", "Deep Ensemble")
TABLE = {
    "single": ("single", False),
    "MC dropout": ("MC dropout", False),
    "Deep Ensemble": ("Deep Ensemble", False),
    "soup": ("soup", False),
    "folded, members": ("folded", False),
    "folded, student": ("folded", True),
    "heads": ("heads", False),
    "parts": ("parts", False),
}
"""Rows of the page: whose answers, and whether the student's."""


def draws_of(rows: Rows, row: str) -> list[tuple[int, int]]:
    """Return the draws of a row: of its answers, and of the half that calibrates.

    What saw no calibration row is calibrated on every half.
    """
    count = rows.draws(row)
    if row in ("single", "folded", "heads", "parts"):
        return [(draw, draw) for draw in range(count)]
    return [(0, draw) for draw in SEEDS]


def table_of(task: HeldTask, rows: Rows) -> dict[str, Any]:
    """Return a task's figures, intervals and differences."""
    kind = TASKS[task.name]
    record: dict[str, Any] = {"rows": {}}
    drawn: dict[str, dict[str, torch.Tensor]] = {}
    for name, (row, student) in TABLE.items():
        if not rows.kept(row):
            continue
        parts: list[dict[str, torch.Tensor]] = []
        far: list[dict[str, Any]] = []
        for draw, half in draws_of(rows, row):
            answers = rows.read(row, draw)
            said = {k: Said(kind, v, student) for k, v in answers.sets.items()}
            if student and "student_logits" not in said["test"].tensors:
                continue
            held_out = said["held_out"].rows(torch.tensor(task.halves(half)[1]))
            counts = resamples(said["test"].texts)
            parts.append(figures_of(task.name, held_out, said["test"], counts))
            others = {k.split("/")[-1]: v for k, v in said.items() if k.startswith("ood/")}
            far.append(outlier_figures(said["test"], others))
        if not parts:
            continue
        drawn[name] = {k: torch.stack([p[k] for p in parts]).nanmean(0) for k in parts[0]}
        record["rows"][name] = {
            "cost": round(rows.read(row, 0).cost, 3),
            "draws": len(parts),
            "figures": {k: round(float(v[0]), 5) for k, v in drawn[name].items()},
            "by draw": {k: [round(float(p[k][0]), 5) for p in parts] for k in parts[0]},
            "far": {k: round(sum(f[k] for f in far) / len(far), 5) for k in far[0]},
        }
    for name, found in drawn.items():
        record["rows"][name]["differences"] = {
            against: {
                k: [round(float(x), 5) for x in (v - drawn[against][k])[:1].tolist()]
                + [round(x, 5) for x in percentiles((v - drawn[against][k])[1:])]
                for k, v in found.items()
                if k in drawn[against]
            }
            for against in AGAINST
            if against in drawn and against != name
        }
    return record


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("answers", "table", "coverage", "spans", "page"))
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--rows", nargs="+", default=list(MAKERS), help="with answers")
    parser.add_argument("--out", type=Path, default=PAGES)
    args = parser.parse_args()
    path = args.out / "every-task.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if args.step == "spans":
        record["spans"] = span_figures(open_task("xquad", args.data, args.hosts))
    for name in args.tasks if args.step in ("answers", "table", "coverage") else ():
        task = open_task(name, args.data, args.hosts)
        assert isinstance(task, HeldTask)
        rows = Rows(task, Store(Path(args.cache) / "every-task", task))
        if args.step == "answers":
            for row in args.rows:
                rows.make(row)
        elif args.step == "table":
            record.setdefault("tasks", {})[name] = table_of(task, rows)
        else:
            record.setdefault("coverage", {})[name] = coverage_of(task, rows)
            keep_for_sets(Path(args.cache) / "sets", task, rows)
    if args.step == "page":
        write_page(record, args.out)
    elif args.step != "answers":
        record["commit"] = this_commit()
        write_whole(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    plainly(main)
