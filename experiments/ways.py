"""Ways to get ahead of the single student: candidates of `tables/ways.yaml` on validation data.

    python experiments/ways.py digits --hosts HOSTS --cache CACHE
    python experiments/ways.py sst2 --only student "own teachers" --draws 0

Each candidate is distilled as a row of a table is, and judged on validation data only;
docs/results/ways-validation.csv gets one line per candidate and draw, and keeps those that it has.
`member NLL` is the mean over members, each by itself. `hosts` says which training of the hosts a
line belongs to: those of the digits are trained on the spot, and differ from machine to machine.
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
import torch.nn.functional as F
from lab import plainly
from lab.answers import Store, Stored, ask
from lab.methods import distilled, draws_of
from lab.records import PAGES
from lab.tasks import open_task
from run import read_table
from torch import Tensor, nn

from hydra_ensembles import evaluate
from hydra_ensembles._records import write_whole
from hydra_ensembles._tensors import model_fingerprint

FIGURES = ("cls/Acc", "cls/NLL", "post/cls/NLL", "fail/AUROC", "sc/AURC", "div/MI")
FIGURES += ("div/Disagreement", "shift/mean/cls/NLL", "member NLL")
COLUMNS = ("task", "hosts", "way", "draw", "cost", *FIGURES)


def candidate(store: Store, row: dict[str, Any], draw: int) -> tuple[list[nn.Module], float]:
    """Return the models of a candidate, whose members answer together, and their cost."""
    if row["method"] == "deep-ensemble":
        return [store.task.host(seed) for seed in row["seeds"]], float(len(row["seeds"]))
    if row["method"] == "apart":  # what members would give that share nothing
        models = [distilled(store, row["of"], draw) for draw in row["of_draws"]]
    else:
        models = [distilled(store, row, draw)]
    return list(models), sum(model.record["cost"] for model in models)


def together(models: list[nn.Module], data: Any) -> dict[str, Tensor]:
    """Ask several models, and put the logits of their members side by side."""
    said = [ask(model, data) for model in models]
    return {**said[0], "logits": torch.cat([one["logits"] for one in said], 1)}


def judged(store: Store, row: dict[str, Any], draw: int) -> dict[str, Any]:
    """Distil a candidate and judge it on the validation data."""
    task = store.task
    models, cost = candidate(store, row, draw)
    # the digits have one validation set for both purposes; corruptions are those of the test
    is_digits = task.name == "digits"
    parts = [task.held_out] if is_digits else [task.held_out, task.calibration]
    shifted = task.corrupted(task.held_out) if is_digits else {}
    said = [together(models, part) for part in parts]
    known = {key: torch.cat([part[key] for part in said]) for key in said[0]}
    found = evaluate(
        Stored(),
        [known],
        shifts={kind: [together(models, data)] for kind, data in shifted.items()} or None,
        temperature=[known],
        score=["msp"],
        progress=False,
        name=row["name"],
    ).figures
    of_members = known["logits"].log_softmax(-1).transpose(1, 2)
    labels = known["labels"][:, None].expand(len(of_members), of_members.shape[2])
    figures = {**found, "member NLL": float(F.nll_loss(of_members, labels))}
    figures = {name: f"{figures[name]:.5f}" for name in FIGURES if name in figures}
    return {"cost": f"{cost:.3f}", **figures}


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
    hosts = model_fingerprint(store.task.host(0))[:6]
    path = args.out / "ways-validation.csv"
    for row in read_table("ways")["candidates"][args.task]:
        if args.only and row["name"] not in args.only:
            continue
        for draw in args.draws or draws_of(row):
            # read anew each time: another task may be judged at the same time
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            wanted = {"task": args.task, "hosts": hosts, "way": row["name"], "draw": draw}
            if any(_key(line) == _key(wanted) for line in _lines(text)):
                continue
            found = {**wanted, **judged(store, row, draw)}
            print(" ".join(f"{k}={v}" for k, v in found.items()), flush=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            _write(path, [*_lines(text), found])


def _lines(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(line[name]) for name in ("task", "hosts", "way", "draw"))


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(sorted(lines, key=_key))
    write_whole(path, text.getvalue())


if __name__ == "__main__":
    plainly(main)
