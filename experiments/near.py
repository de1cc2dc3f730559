"""Near novelty: `docs/results/near.md`.

    python experiments/near.py features --data DATA --cache CACHE
    python experiments/near.py table --cache CACHE
    python experiments/near.py alarms --cache CACHE
    python experiments/near.py page

`features` runs the hosts that nobody fine-tuned, and trains small ViTs without two digits; hosts
that were fine-tuned have theirs from `novelty.py features`. `table` fits novelty with the usual
terms and with terms that may join, and every rival, on each draw of each column. `alarms` counts
false alarms on splits of every task. A stopped run goes on. Nothing is chosen on a set that a
table reports, but for the sets that a page names as such.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.detectors import Set
from lab.known import BRANCHED
from lab.near_cases import Draw, columns, tuned, untuned_texts
from lab.near_features import keep_digits, keep_images, keep_texts
from lab.near_page import ALONE, page
from lab.records import PAGES, this_commit
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.metrics import ood_figures

OURS: dict[str, dict[str, bool]] = {
    "usual": {"choose": False},
    "default": {"choose": True},
    "usual, no labels": {"choose": False, "labels": False},
    "default, no labels": {"choose": True, "labels": False},
    "default, training data": {"choose": True, "train": True},
}
"""Our rows; the first draw has all of them, the others the first two."""
ABSENT = ("absent", -1)
"""The term of classes that the host learned and the known data lacks."""


def auroc(score: Callable[[Set], Tensor], draw: Draw) -> dict[str, float]:
    """Return AUROC of every outlier set in percent."""
    inside = score(draw.test).double()
    found = {}
    for name, outliers in draw.outliers.items():
        value = ood_figures(inside, score(outliers).double())["AUROC"]
        found[name] = round(100 * value, 3)
    return found


def figures(
    draw: Draw, ours: Sequence[str], earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the figures of all rows on one draw; those of rivals may be there from earlier."""
    right = draw.test["members"].softmax(-1).mean(1).argmax(-1) == draw.test["labels"]
    record: dict[str, Any] = {
        "commit": this_commit(),
        "accuracy": round(100 * float(right.double().mean()), 2),
        "known": len(draw.known["labels"]),
        "far": list(draw.far),
        "rows": {},
    }
    for row, options in OURS.items():
        if row not in ours or (options.get("train") and draw.trained is None):
            continue
        novelty = draw.novelty(**options)
        if row == "usual" and ABSENT in novelty.chosen:
            place = novelty.chosen.index(ABSENT)
            record["rows"][ALONE] = auroc(
                lambda d, n=novelty, p=place: n.surprise(d["taps"], d["members"])[:, p], draw
            )
        found: dict[str, Any] = auroc(lambda d, n=novelty: n(d["taps"], d["members"])[1], draw)
        rank = novelty(draw.test["taps"], draw.test["members"])[0]
        record["rows"][row] = found
        record[row] = {
            "says": novelty.choice,
            "alarms": round(100 * float((rank > 0.95).double().mean()), 2),
        }
    if earlier is not None:
        rivals = {row: v for row, v in earlier["rows"].items() if row not in (*OURS, ALONE)}
        return record | {"rows": record["rows"] | rivals}
    for row, score in draw.rivals().items():
        found = auroc(score, draw)
        if not any(value != value for value in found.values()):
            record["rows"][row] = found
    return record


def write_table(cache: Path, path: Path, only: str, draws_of: int, again: bool) -> None:
    """Compute the draws that are missing in the record, or our rows of those that are there."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record["command"] = "python experiments/near.py table"
    for column, draws in columns(cache).items():
        if not column.startswith(only):
            continue
        found = record.setdefault("columns", {}).setdefault(column, {})
        for seed, draw in enumerate(draws):
            if (str(seed) in found) != again or seed >= draws_of:
                continue
            try:
                ours = [*OURS][: 2 if seed else None]
                found[str(seed)] = figures(draw(), ours, found.get(str(seed)))
            except (KeyError, FileNotFoundError):
                print(f"{column}, {seed}: no features", flush=True)
                continue
            rows = found[str(seed)]["rows"]
            print(f"{column}, {seed}: {rows['usual']} {rows['default']}", flush=True)
            write_whole(path, json.dumps(record) + "\n")


# --- false alarms


def isotropic(count: int, seed: int) -> Draw:
    """Draw features that spread evenly in 192 directions, and noise as logits."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(number: int) -> Set:
        labels = torch.arange(number) % 10
        taps = torch.randn(number, 7, 192, generator=generator)
        logits = torch.randn(number, 1, 10, generator=generator)
        return {"taps": taps, "members": logits, "labels": labels}

    return Draw(drawn(count), drawn(1000), {})


def alarm_draws(cache: Path) -> dict[str, Callable[[int], Draw]]:
    """Return known and new data drawn together, by task and number of known examples."""
    found: dict[str, Callable[[int], Draw]] = {}
    for count in (200, 600):
        found[f"evenly spread features, {count}"] = lambda seed, n=count: isotropic(n, seed)
    for intents, each in ((30, 7), (30, 20), (150, 10)):
        name = f"CLINC150, untuned, {intents} intents, {intents * each}"
        found[name] = lambda seed, n=each, out=150 - intents: untuned_texts(
            cache, "minilm", 1000 + seed, left_out=out, each=n, redrawn=True
        )
    for task, most in (("cifar10", 1000), ("clinc150", 1000), ("digits", 360), ("sst2", 1000)):
        folder = cache / "novelty" / task
        for count in (200, most):
            found[f"{task}, {count}"] = lambda seed, n=count, f=folder, t=task: tuned(
                f, 1000 + seed, branched=BRANCHED[t], far=(), count=n, redrawn=True
            )
    return found


def write_alarms(cache: Path, path: Path, only: str, splits: int) -> None:
    """Count false alarms at 5 % where the record lacks them."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    alarms = record.setdefault("alarms", {})
    for name, draw_of in alarm_draws(cache).items():
        if not name.startswith(only):
            continue
        found = alarms.setdefault(name, {})
        for seed in range(splits):
            if str(seed) in found:
                continue
            try:
                draw = draw_of(seed)
            except (KeyError, FileNotFoundError):
                print(f"{name}: no features", flush=True)
                break
            novelty = draw.novelty(choose=True)
            rank = novelty(draw.test["taps"], draw.test["members"])[0]
            rate = 100 * float((rank > 0.95).double().mean())
            joined = novelty.choice.startswith("the usual terms and others")
            found[str(seed)] = [round(rate, 3), joined]
            write_whole(path, json.dumps(record) + "\n")
        if not found:
            del alarms[name]
            continue
        mean = sum(rate for rate, _ in found.values()) / len(found)
        print(f"{name}: {mean:.2f} % of {len(found)} splits", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("features", "table", "alarms", "page"))
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--only", help="with table and alarms: columns whose names begin so")
    parser.add_argument("--draws", type=int, default=10, help="with table: at most so many each")
    parser.add_argument("--splits", type=int, default=200, help="with alarms: of each task")
    parser.add_argument("--again", action="store_true", help="with table: our rows once more")
    args = parser.parse_args()
    cache, path = Path(args.cache), PAGES / "near.json"
    torch.set_num_threads(1)
    if args.step == "features":
        if args.data is None:
            parser.error("name the folder of the data: --data, or HYDRA_DATA")
        keep_digits(cache, args.hosts)
        keep_texts(Path(args.data), cache)
        keep_images(Path(args.data), cache)
    elif args.step == "table":
        write_table(cache, path, args.only or "", args.draws, args.again)
    elif args.step == "alarms":
        write_alarms(cache, path, args.only or "", args.splits)
    else:
        write_whole(PAGES / "near.md", page(json.loads(path.read_text())))


if __name__ == "__main__":
    plainly(main)
