"""Ways to get ahead of the single student: candidates of `tables/ways.yaml` on validation data.

    python experiments/ways.py digits --hosts HOSTS --cache CACHE
    python experiments/ways.py sst2 --only student "own teachers" --draws 0

Each candidate is distilled as a row of a table is, and judged on validation data only;
docs/results/ways-validation.csv gets one line per candidate and draw, and keeps those that it has.
What is chosen is then tested once, by `run.py ways` (five folds of the digits) and by the tables
of the other tasks.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
from pathlib import Path
from typing import Any

import torch
from lab.answers import Store, Stored, ask
from lab.methods import distilled, draws_of
from lab.records import PAGES
from lab.tasks import open_task
from run import read_table

from hydra_ensembles import evaluate
from hydra_ensembles._records import write_whole

FIGURES = ("cls/Acc", "cls/NLL", "post/cls/NLL", "fail/AUROC", "sc/AURC", "div/MI")
FIGURES += ("div/Disagreement",)
COLUMNS = ("task", "way", "draw", "cost", *FIGURES)


def judged(store: Store, row: dict[str, Any], draw: int) -> dict[str, Any]:
    """Distil a candidate and judge it on the validation data."""
    task = store.task
    # the digits have one validation set for both purposes
    parts = [task.held_out] if task.name == "digits" else [task.held_out, task.calibration]
    if row["method"] == "distill":
        model = distilled(store, row, draw)
        cost, said = model.record["cost"], [ask(model, part) for part in parts]
    else:
        models = [task.host(seed) for seed in row["seeds"]]
        cost, each = float(len(models)), [[ask(m, part) for m in models] for part in parts]
        said = [{**p[0], "logits": torch.cat([one["logits"] for one in p], 1)} for p in each]
    known = {key: torch.cat([part[key] for part in said]) for key in said[0]}
    found = evaluate(
        Stored(), [known], temperature=[known], score=["msp"], progress=False, name=row["name"]
    ).figures
    figures = {name: f"{found[name]:.5f}" for name in FIGURES if name in found}
    line = {"task": task.name, "way": row["name"], "draw": draw, "cost": f"{cost:.3f}"}
    return {**line, **figures}


def main() -> None:
    """Judge what is not judged yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--only", nargs="+", help="names of candidates")
    parser.add_argument("--draws", nargs="+", type=int)
    parser.add_argument("--out", type=Path, default=PAGES)
    args = parser.parse_args()
    store = Store(Path(args.cache), open_task(args.task, args.data, args.hosts))
    path = args.out / "ways-validation.csv"
    for row in read_table("ways")["candidates"][args.task]:
        if args.only and row["name"] not in args.only:
            continue
        for draw in args.draws or draws_of(row):
            # read anew each time: another task may be judged at the same time
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if any(_key(line) == (args.task, row["name"], str(draw)) for line in _lines(text)):
                continue
            found = judged(store, row, draw)
            print(" ".join(f"{k}={v}" for k, v in found.items()), flush=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            _write(path, [*_lines(text), found])


def _lines(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["task"], line["way"], str(line["draw"])


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(sorted(lines, key=_key))
    write_whole(path, text.getvalue())


if __name__ == "__main__":
    main()
