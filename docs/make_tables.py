"""Fill the tables of README.md and docs/results.md: `python docs/make_tables.py [--check]`.

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`. `cost` comes from
benchmarks/results, `results` from the records that `experiments/novelty.py` writes to docs/results,
`fold` from the CSV records of the tables on least squares,
`records` from all records there and experiments/results/parts.csv.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "vit-s"
COST_ROWS = {
    "hydra last 1": "the last block",
    "hydra last 2": "the last two blocks",
    "hydra last 3": "the last three blocks",
    "hydra first": "the first block",
    "deep ensemble": "Deep Ensemble of three",
}
TASKS = {
    "imagenet": "ImageNet, DeiT-tiny",
    "cifar10": "CIFAR-10, DeiT-tiny",
    "sst2": "SST-2, MiniLM",
    "clinc150": "CLINC150, MiniLM",
    "digits": "digits, small ViT",
}
COLUMNS = {
    "MSP": ("msp",),
    "energy": ("energy",),
    "KNN": ("knn, trained statistics", "knn"),
    "Mahalanobis++": ("mahalanobis++, trained statistics", "mahalanobis++"),
    "Mahalanobis++, all layers": (
        "multi-layer mahalanobis++, trained statistics",
        "multi-layer mahalanobis++",
    ),
    "Deep Ensemble, energy": ("Deep Ensemble, energy",),
    "single + novelty": ("single + novelty",),
    "student + novelty": ("single student + novelty",),
    "Hydra + novelty": ("novelty",),
}
"""Columns of the results and the rows that fill them: the first that a record has."""


FOLD_ROWS = {
    "single": "one fine-tuned model",
    "Deep Ensemble": "Deep Ensemble of three",
    "folded, student": "**three folded into one**",
    "folded at 0.75, student": "the same, pruned to 0.75",
    "folded at 0.5, student": "the same, pruned to 0.5",
    "pruned to 0.5": "one model, pruned and refitted",
    "pruned to 0.5, no refit": "one model, pruned only",
}
"""Rows of the tables on least squares that the README shows."""

FOLD_TASKS = {"clinc150": "CLINC150", "sst2": "SST-2", "cola": "CoLA", "cifar10": "CIFAR-10"}
"""Tasks of these tables."""

RECORDS = {
    **{f"{page}.csv": page for page in ("text", "paper-sst2", "paper-cola", "cifar10", "imagenet")},
    **{f"{page}.csv": page for page in ("digits", "members", "ways", "pruning")},
    **{
        file.name: "least-squares"
        for file in sorted((ROOT / "docs" / "results").glob("least-squares-*.csv"))
        if not file.stem.endswith("-differences")
    },
    **{f"parts-{task}.csv": "parts" for task in ("cifar10", "clinc150", "sst2")},
    **{f"{page}.json": page for page in ("teachers", "hies", "llama", "near", "every-task")},
    "choosing-digits.json": "choosing",
    "fold-gap.json": "least-squares",
    "prune-llama.json": "least-squares",
    **{f"novelty-{task}.json": "novelty" for task in (*TASKS, "cifar8")},
    "uncertainty-heads.json": "claims",
    "zero-shot-reach.json": "claims",
}
"""Records and the pages that show them."""


def records_table(root: Path = ROOT) -> str:
    """Return what made each page: its records, their commits and hashes, minutes of processors."""
    with (root / "experiments" / "results" / "parts.csv").open(encoding="utf-8") as file:
        minutes = {row["part"]: float(row["processor_minutes"]) for row in csv.DictReader(file)}
    rows = []
    for name, page in RECORDS.items():
        path = root / "docs" / "results" / name
        if not path.exists():
            continue
        text, stem = path.read_text(encoding="utf-8"), path.stem
        parts = [f"table-{stem}", stem, f"{stem}-*"]
        if page == "novelty":
            parts += [stem.replace("novelty", kind) + "-*" for kind in ("host", "features")]
        took = [value for part, value in minutes.items() if any(fnmatch(part, p) for p in parts)]
        rows.append(
            [
                f"[{page}]({'' if page == 'claims' else 'results/'}{page}.md)",
                f"[{name}](results/{name})",
                ", ".join(sorted(set(_commits(text, path.suffix)))),
                hashlib.sha256(text.encode()).hexdigest()[:16],
                f"{sum(took):.1f}" if took else "–",
            ]
        )
    said = (
        "Minutes are of one core, hosts and features included, as the last run of each part of "
        "`bash experiments/reproduce.sh` took them; a dash: made before parts were timed. A plus: "
        "the code had changes that were committed later. The hash is the beginning of the record's "
        "SHA-256. Minutes, sizes and hashes of hosts, logits and features, part by part: "
        "`experiments/results/parts.csv`."
    )
    return grid(["page", "record", "commit", "SHA-256", "minutes"], rows, said)


def _commits(text: str, suffix: str) -> Iterator[str]:
    """Find the commits that a record names."""
    if suffix == ".csv":
        yield from (row["commit"] for row in csv.DictReader(text.splitlines()))
        return
    todo = [json.loads(text)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("commit"), str):
                yield part["commit"]
            todo += part.values()


def cost_table(root: Path = ROOT) -> str:
    """Return the counted and the measured ratios of one ViT shape."""
    cells: dict[str, dict[Any, str]] = {}
    for file in sorted((root / "benchmarks" / "results").glob(f"latency-{SHAPE}-*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            cell = cells.setdefault(row["name"], {})
            cell["counted"] = f"{row['counted_ratio']:.2f}"
            cell[row["batch_size"]] = f"{row['ratio']['value']:.2f}"
    columns = ("counted", 1, 8, 32)
    rows = [
        [title, *(cells.get(name, {}).get(column, "–") for column in columns)]
        for name, title in COST_ROWS.items()
    ]
    head = ["three members, branching at", "counted", "batch 1", "batch 8", "batch 32"]
    said = (
        "A ViT-S against the plain single model: multiply-adds, then the median time on a CPU in "
        "one interleaved run (a third of the heads each, float32): `sh benchmarks/run_all.sh`. "
        "[Intervals, rivals, other models](docs/results/cost.md)."
    )
    return grid(head, rows, said)


def fold_table(root: Path = ROOT) -> str:
    """Return cost, and accuracy and NLL by task, of folded and pruned models."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    present = []
    for task in FOLD_TASKS:
        path = root / "docs" / "results" / f"least-squares-{task}.csv"
        if path.exists():
            present.append(task)
            for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
                found.setdefault((task, line["row"]), []).append(line)
    rows = []
    for name, title in FOLD_ROWS.items():
        lines = {task: found.get((task, name), []) for task in present}
        costs = [_mean(some, "cost") for some in lines.values() if some]
        if costs:
            span = sorted({f"{min(costs):.2f}", f"{max(costs):.2f}"})
            cells = [
                f"{100 * _mean(some, 'cls/Acc'):.1f}, {_mean(some, 'post/cls/NLL'):.3f}"
                if some
                else "–"
                for some in lines.values()
            ]
            rows.append([title, " to ".join(span), *cells])
    said = (
        "Accuracy in %, NLL at one temperature; counted cost against one model. MiniLM on texts, "
        "DeiT-tiny on images; one trio of fine-tunings each, two for CoLA. No labels and no "
        "training after the fine-tunings. [Intervals, rivals, what is "
        "lost](docs/results/least-squares.md): "
        "`python experiments/run.py least-squares-clinc150`."
    )
    return grid(["", "cost", *(FOLD_TASKS[task] for task in present)], rows, said)


def _mean(lines: Sequence[Mapping[str, str]], column: str) -> float:
    return sum(float(line[column]) for line in lines) / len(lines)


def results_table(root: Path = ROOT) -> str:
    """Return how well outliers are told from known data: one row per task and kind of outliers."""
    rows, draws = [], set()
    for task, title in TASKS.items():
        path = root / "docs" / "results" / f"novelty-{task}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        draws.add(len(record["detectors"][str(record["usual"])]))
        for kind in ("near", "far"):
            if record["families"][kind]:
                rows.append([f"{title}: {kind}", *_cells(record, kind)])
    said = (
        f"AUROC in %, mean over outlier families and {' or '.join(map(str, sorted(draws)))} draws "
        "of known data; no outlier was seen. Bold: the best of a row and all that a paired "
        "bootstrap does not tell from it. KNN and Mahalanobis++ have the statistics of the "
        "training set (ImageNet: of the known data); *all layers* adds up -log p over the taps of "
        "novelty; a *student* is one model distilled from three. [Families, more rivals, where a "
        "rival wins](docs/results/novelty.md): `bash experiments/reproduce.sh`."
    )
    return grid(["outliers", *COLUMNS], rows, said)


def _cells(record: Mapping[str, Any], kind: str) -> list[str]:
    """Return a row of the results; bold is the best and what is not told from it."""
    rows = [next((n for n in names if n in record["rows"]), None) for names in COLUMNS.values()]
    draws = record["detectors"][str(record["usual"])]
    means = {row: _mean_auroc(draws, row, record["families"][kind]) for row in rows if row}
    best = max(means, key=lambda row: means[row])
    below = record["above"][kind][record["rows"].index(best)]
    bold = {row for row in means if record["rows"].index(row) not in below}
    shown = {row: f"**{means[row]:.1f}**" if row in bold else f"{means[row]:.1f}" for row in means}
    return [shown[row] if row else "–" for row in rows]


def _mean_auroc(draws: Sequence[Mapping[str, Any]], name: str, sets: Sequence[str]) -> float:
    values = [draw[name][family]["AUROC"] for draw in draws for family in sets]
    return sum(values) / len(values)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], said: str) -> str:
    """Return a Markdown table and a line below it."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:], "", said])


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Put tables between their markers."""
    for name, body in tables.items():
        pattern = rf"(<!-- table:{re.escape(name)} -->\n).*?(\n<!-- /table:{re.escape(name)} -->)"
        text, count = re.subn(pattern, lambda m, b=body: m[1] + b + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"There are {count} places for the table {name!r}; expected one.")
    return text


def tables(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return the tables by file and name."""
    return {
        "README.md": {
            "fold": fold_table(root),
            "cost": cost_table(root),
            "results": results_table(root),
        },
        "docs/results.md": {"records": records_table(root)},
    }


def main() -> int:
    """Fill the tables, or with `--check` say whether they are up to date."""
    stale = []
    for name, bodies in tables().items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = fill(before, bodies)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(after, encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        return 0
    sys.stdout.write(f"out of date: {', '.join(stale)}\n" if stale else "up to date\n")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
