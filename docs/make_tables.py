"""Fill the tables of README.md from result files: `python docs/make_tables.py [--check]`.

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`. `cost` comes from
benchmarks/results, `results` from the records that `experiments/run.py` writes to docs/results.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ("vit-s", "vit-b")
COST_ROWS = ("single readout", "hydra last 1", "hydra last 2", "hydra last 3", "deep ensemble")
RESULT_ROWS = {
    "text": ("SST-2", ("single", "Deep Ensembles", "Hydra select M=3", "Hydra distilled")),
    "cifar10": ("CIFAR-10", ("single", "Deep Ensembles", "Hydra select M=3", "Hydra distilled")),
    "imagenet": ("ImageNet", ("single", "Hydra M=3, trained with proxies")),
}
FIGURES = {
    "accuracy": ["cls/Acc"],
    "NLL raw / scaled": ["cls/NLL", "post/cls/NLL"],
    "AUROC seen / unseen": ["ood/seen/mean/AUROC", "ood/unseen/mean/AUROC"],
    "FPR95 seen / unseen": ["ood/seen/mean/FPR95", "ood/unseen/mean/FPR95"],
}


def cost_table(root: Path = ROOT) -> str:
    """Return the measured ratios of both ViT shapes."""
    cells: dict[tuple[str, str], dict[Any, str]] = {}
    for shape in SHAPES:
        for file in sorted((root / "benchmarks" / "results").glob(f"latency-{shape}-*.json")):
            for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
                cell = cells.setdefault((row["name"], shape), {})
                cell["counted"] = f"{row['counted_ratio']:.2f}"
                cell[row["batch_size"]] = f"{row['ratio']['value']:.2f}"
    head = [
        "",
        *(f"ViT-{s[-1].upper()} {c}" for s in SHAPES for c in ("counted", "b1", "b8", "b32")),
    ]
    rows = [
        [
            name,
            *(cells.get((name, s), {}).get(c, "–") for s in SHAPES for c in ("counted", 1, 8, 32)),
        ]
        for name in COST_ROWS
    ]
    said = "Median time against one model (M = 3, a third of the heads each, float32, CPU); "
    return grid(head, rows, f"{said}[intervals, rivals, other models](docs/results/cost.md).")


def results_table(root: Path = ROOT) -> str:
    """Return the main rows on real models, each the mean over draws; no line for rows not run."""
    rows = []
    for table, (task, names) in RESULT_ROWS.items():
        path = root / "docs" / "results" / f"{table}.csv"
        if not path.exists():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        for name in names:
            draws = [line for line in lines if line["row"] == name]
            if draws:
                cells = [" / ".join(_mean(draws, f) for f in keys) for keys in FIGURES.values()]
                cost = max(float(line["cost"]) for line in draws)
                rows.append([f"{task}: {name}", f"{cost:.2f} x", *cells])
    said = "`scaled`: one temperature per row. OOD by maximum softmax probability, raw. Intervals, "
    return grid(
        ["", "cost", *FIGURES], rows, f"{said}rivals and setups: [results](docs/results.md)."
    )


def _mean(draws: Sequence[Mapping[str, str]], figure: str) -> str:
    values = [float(line[figure]) for line in draws if line.get(figure)]
    if not values:
        return "–"
    mean = sum(values) / len(values)
    return f"{mean:.3f}" if figure.endswith("NLL") else f"{100 * mean:.1f}"


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
            raise ValueError(f"README.md has {count} places for the table {name!r}; expected one.")
    return text


def tables(root: Path = ROOT) -> dict[str, str]:
    """Return the tables by name."""
    return {"cost": cost_table(root), "results": results_table(root)}


def main() -> int:
    """Fill the tables, or with `--check` say whether they are up to date."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = fill(before, tables())
    if "--check" in sys.argv[1:]:
        sys.stdout.write("up to date\n" if after == before else "README.md is out of date\n")
        return int(after != before)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
