"""What sets guarantee and what they keep, over 200 splits: the tables of `docs/concepts/sets.md`.

    python experiments/set_coverage.py answers digits --cache CACHE --hosts HOSTS   # run hosts once
    python experiments/set_coverage.py --cache CACHE             # all stored tasks: minutes
    python experiments/set_coverage.py --cache CACHE digits      # one; the others stay as they are
    python experiments/set_coverage.py --page                    # the tables again, from the record

Every task is one file `CACHE/sets/TASK.safetensors` of labelled data that no host was trained on:
`outputs` of the members `[example, member, ...]`, `labels`, and where there are any `novelty`,
`novelty_score` and `mask` (real tokens). `answers` makes those of classifiers, by three fine-tuned
hosts as members, and `TASK-shift.safetensors` of corrupted test data. A split draws the held-out
examples that sets are fitted on; the rest is tested. Figures go to
`experiments/results/set_coverage.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import plainly
from lab.answers import ask
from lab.tasks import open_task
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles._records import write_whole
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.errors import DataError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.prediction_sets import Sets
from hydra_ensembles.tasks import as_task
from hydra_ensembles.uncertainty import choose_sets

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "set_coverage.json"
PAGE = ROOT / "docs" / "concepts" / "sets.md"
SPLITS, COVERAGE = 200, 0.9
HELD_OUT = {"digits": 200, "sst2": 400, "clinc150": 500, "stsb": 400, "goemotions": 500}
"""Held-out examples of a split; 200 elsewhere."""
KINDS = {"goemotions": "multi-label", "stsb": "regression", "wnut17": "token-classification"}
"""What is not one class per input."""
NAMES = {"digits": "digits", "sst2": "SST-2", "clinc150": "CLINC150", "goemotions": "GoEmotions"}
NAMES |= {"stsb": "STS-B", "wnut17": "WNUT17"}
SHIFTS = {"digits": ("gaussian_noise", 4), "sst2": ("typos", 5), "clinc150": ("typos", 5)}
NEW = 0.95
CLASSES: dict[str, dict[str, Any]] = {
    "lac": {"method": "lac"},
    "lac, single model": {"method": "lac"},
    "lac, by class": {"method": "lac", "groups": "class"},
    "aps": {"method": "aps"},
    "aps, randomised": {"method": "aps", "randomised": True},
    "raps": {"method": "raps"},
}


# --- answers


def make_answers(name: str, cache: Path, data: Path | None, hosts: Path | None) -> None:
    """Run the hosts of a task over labelled data that they were not trained on; store answers."""
    task = open_task(name, data, hosts)
    members = [task.host(seed) for seed in (0, 1, 2)]
    first = fuse(members[0], [HeadMask.full(members[0])]).eval()
    if task.calibration is task.held_out:  # digits: known data is every other example
        count = task.held_out.count
        known = task.held_out.subset(range(0, count, 2))
        parts = [task.held_out.subset(range(1, count, 2)), task.test]
    else:
        known, parts = task.calibration, [task.held_out, task.test]
    first.fit_novelty_(known, progress=False)
    look = {}
    if name == "digits":
        look = {"mean": task._demo.mean, "std": task._demo.std}  # type: ignore[attr-defined]
    kind, severity = SHIFTS[name]
    shifted = [corrupted(task.test, kind, severity=severity, **look)]
    folder = cache / "sets"
    folder.mkdir(parents=True, exist_ok=True)
    for file, sets in {name: parts, f"{name}-shift": shifted}.items():
        said: dict[str, list[Tensor]] = {}
        for part in sets:
            own = ask(first, part)
            others = [ask(member, part) for member in members[1:]]
            found = {key: own[key] for key in ("labels", "novelty", "novelty_score")}
            found["outputs"] = torch.cat([own["logits"], *(one["logits"] for one in others)], 1)
            for key, value in found.items():
                said.setdefault(key, []).append(value)
        tensors = {key: torch.cat(values).contiguous() for key, values in said.items()}
        save_file(tensors, folder / f"{file}.safetensors")
        print(f"{file}: {len(tensors['labels'])} examples", flush=True)


# --- splits


class Pool:
    """Stored answers of a task: those of all members, and of the first alone."""

    def __init__(self, name: str, path: Path) -> None:
        if not path.exists():
            raise DataError(
                f"There is no {path}. Make it with `python experiments/set_coverage.py answers "
                f"{name}`."
            )
        stored = load_file(path)
        kind = as_task(KINDS.get(name, "multi-class"))
        more: dict[str, Any] = {}
        if kind.reads_inputs and "mask" in stored:
            more = {"inputs": {"attention_mask": stored["mask"]}}
        novelty = {key: stored[key] for key in ("novelty", "novelty_score") if key in stored}

        def answered(outputs: Tensor) -> Prediction:
            answer = kind.answer(outputs, score=kind.default_score, **more)
            return replace(answer, **novelty).to_numpy()

        outputs = stored["outputs"].float()
        self.labels = kind.check_labels(stored["labels"], str(path)).numpy()
        self.all, self.single = answered(outputs), answered(outputs[:, :1])
        self.by_token, self.classifies = kind.by_token, kind.classifies
        self.asked = CLASSES
        if not kind.classifies or kind.by_token:
            self.asked = {method: {"method": method} for method in kind.sets}

    def answers(self, asked: str) -> Prediction:
        """Return the answers that a row is about."""
        return self.single if "single" in asked else self.all


def shares(sets: Sets, answer: Prediction, labels: np.ndarray) -> np.ndarray:
    """Return what share of what is true is covered, by example; of texts by text."""
    found = sets.covered(answer, labels)
    if len(found) == len(labels):
        return found
    counted = answer.real & (labels != -100)
    owner = np.nonzero(counted)[0]
    sums = np.bincount(owner, weights=found, minlength=len(labels))
    return sums / np.maximum(np.bincount(owner, minlength=len(labels)), 1)


def measure(name: str, cache: Path) -> dict[str, Any]:
    """Fit and test sets on all splits of a task."""
    pool = Pool(name, cache / "sets" / f"{name}.safetensors")
    beside = cache / "sets" / f"{name}-shift.safetensors"
    shift = Pool(name, beside) if beside.exists() else None
    labels, count = pool.labels, len(pool.labels)
    held_out = HELD_OUT.get(name, 200)
    if pool.by_token:  # a text without labelled tokens is covered by nothing
        some = (labels != -100).any(1).nonzero()[0]
        pool.all, pool.single, labels = pool.all[some], pool.single[some], labels[some]
        count = len(labels)
    rows: dict[str, Any] = {}
    for asked, options in pool.asked.items():
        answers = pool.answers(asked)
        means, sizes, empties = [], [], []
        hits, seen = np.zeros(count), np.zeros(count)
        moved: list[np.ndarray] = []
        for split in range(SPLITS):
            order = np.random.default_rng(split).permutation(count)
            fit, test = np.sort(order[:held_out]), np.sort(order[held_out:])
            sets = choose_sets(answers[fit], labels[fit], coverage=COVERAGE, seed=split, **options)
            found, size = shares(sets, answers[test], labels[test]), sets.sizes(answers[test])
            means.append(found.mean())
            sizes.append(size.mean())
            empties.append((size == 0).mean())
            hits[test] += found
            seen[test] += 1
            if shift is not None and split < 20:
                moved.append(shares(sets, shift.answers(asked), shift.labels))
        row = {
            "coverage": float(np.mean(means)),
            "error": float(np.std(means, ddof=1) / math.sqrt(SPLITS)),
            "splits_5_95": [float(x) for x in np.quantile(means, [0.05, 0.95])],
            "size": float(np.mean(sizes)),
            "empty": float(np.mean(empties)),
        }
        if pool.classifies and not pool.by_token:
            per_class = [
                hits[labels == c].sum() / seen[labels == c].sum() for c in np.unique(labels)
            ]
            row |= {"worst_class": float(min(per_class)), "best_class": float(max(per_class))}
        novelty = answers.novelty
        if novelty is not None:
            row["by_novelty"] = _by_novelty(hits, seen, novelty)
        if shift is not None:
            strange = shift.answers(asked).novelty
            mean = np.mean(moved, axis=0)
            row["shifted"] = _by_novelty(mean, np.ones(len(mean)), strange)
        rows[asked] = row
        print(f"{name}, {asked}: {row['coverage']:.4f}, size {row['size']:.3f}", flush=True)
    return {
        "splits": SPLITS,
        "asked": COVERAGE,
        "held_out": held_out,
        "test": count - held_out,
        "shift": SHIFTS.get(name) if shift is not None else None,
        "rows": rows,
    }


def _by_novelty(hits: np.ndarray, seen: np.ndarray, novelty: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {"all": float(hits.sum() / seen.sum())}
    for name, chosen in {"known": novelty <= NEW, "new": novelty > NEW}.items():
        found[f"{name}_share"] = float(chosen.mean())
        if seen[chosen].sum():
            found[name] = float(hits[chosen].sum() / seen[chosen].sum())
    return found


# --- the page


def within(row: dict[str, Any], held_out: int, asked: float) -> bool:
    """Tell whether the mean over splits is what the guarantee says: at least what was asked, and
    at most what n examples can overshoot by, within three standard errors of the mean."""
    low, high = asked - 3 * row["error"], asked + 2 / (held_out + 1) + 3 * row["error"]
    return bool(low <= row["coverage"] <= high)


def percent(value: float | None) -> str:
    """Return a share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f}"


def coverage_table(record: dict[str, Any]) -> str:
    """Return the table of coverage and size."""
    lines = [
        "| task | sets | coverage, mean (standard error) | 5 to 95 % of splits | as guaranteed "
        "| size | empty | worst class |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for task, found in record.items():
        for name, row in found["rows"].items():
            low, high = row["splits_5_95"]
            by_class = "by class" in name or "raps" in name  # of fewer examples than held out
            good = within(row, found["held_out"] // (50 if by_class else 1), found["asked"])
            cells = [
                NAMES.get(task, task),
                name,
                f"{percent(row['coverage'])} ({100 * row['error']:.2f})",
                f"{percent(low)} to {percent(high)}",
                "yes" if good else "no",
                f"{row['size']:.2f}",
                percent(row["empty"]),
                percent(row.get("worst_class")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def novelty_table(record: dict[str, Any]) -> str:
    """Return the table of coverage by novelty, on the test data and on shifted data."""
    lines = [
        "| task | data | new | coverage of all | of what is not new | of what is new |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for task, found in record.items():
        row = next(iter(found["rows"].values()))
        kinds = {"like the held-out": row.get("by_novelty")}
        if found["shift"]:
            kinds[f"{found['shift'][0]}, severity {found['shift'][1]}"] = row.get("shifted")
        for data, part in kinds.items():
            if part is None:
                continue
            cells = [NAMES.get(task, task), data]
            cells += [percent(part.get(key)) for key in ("new_share", "all", "known", "new")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    """Put the tables between their marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    tables = {"coverage": coverage_table(record), "novelty": novelty_table(record)}
    for mark, table in tables.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    write_whole(PAGE, text)


def main() -> None:
    """Store answers, or measure tasks and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", help="`answers` first to run hosts; by default all")
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--page", action="store_true", help="only write the tables")
    args = parser.parse_args()
    cache, tasks = Path(args.cache), args.tasks
    if tasks[:1] == ["answers"]:
        for name in tasks[1:] or SHIFTS:
            make_answers(name, cache, args.data, args.hosts)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not args.page:
        stored = {path.stem for path in (cache / "sets").glob("*.safetensors")}
        for task in tasks or [name for name in NAMES if name in stored]:
            record[task] = measure(task, cache)
            record = {name: record[name] for name in [*NAMES, task] if name in record}
            write_whole(RECORD, json.dumps(record, indent=1) + "\n")
    write_page(record)


if __name__ == "__main__":
    plainly(main)
