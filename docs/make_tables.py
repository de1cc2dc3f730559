"""Fill the tables of README.md from JSON files: `python docs/make_tables.py [--check]`.

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`. Its rows come from every
JSON file in benchmarks/results, experiments/results and docs/results that has a `"readme"` entry:

    {"readme": {"table": "results", "order": 1, "title": "SST-2, MiniLM",
                "command": "python experiments/text.py",
                "columns": ["", "cost", "NLL"], "rows": [["single", "1.00 x", "0.309"], ...]}}
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks/results", "experiments/results", "docs/results")


def entries(root: Path = ROOT) -> list[dict[str, Any]]:
    """Read the `readme` entries of all result files, in their order."""
    found = []
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            entry = content.get("readme") if isinstance(content, dict) else None
            for one in entry if isinstance(entry, list) else [entry] if entry else []:
                found.append({**one, "file": file.relative_to(root).as_posix()})
    return sorted(found, key=lambda e: (e.get("order", 99), e["file"]))


def cost_entry(root: Path = ROOT) -> list[dict[str, Any]]:
    """Gather the measured ratios of both ViT shapes into one table."""
    folder = root / "benchmarks" / "results"
    cells: dict[tuple[str, str], dict[Any, str]] = {}
    for shape in ("vit-s", "vit-b"):
        for file in sorted(folder.glob(f"latency-{shape}-*.json")):
            for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
                key = (row["name"], shape)
                cell = cells.setdefault(key, {"counted": f"{row['counted_ratio']:.2f}"})
                cell[row["batch_size"]] = f"{row['ratio']['value']:.2f}"
    if not cells:
        return []
    order = ("single readout", "hydra last 1", "hydra last 2", "hydra last 3", "hydra first all")
    order += ("hydra first", "loop", "deep ensemble", "mc dropout", "batch", "packed")
    names = sorted(
        sorted({name for name, _ in cells if name != "single"}),
        key=lambda name: next((i for i, o in enumerate(order) if name.startswith(o)), 99),
    )
    rows = []
    for name in names:
        row = [name]
        for shape in ("vit-s", "vit-b"):
            cell = cells.get((name, shape), {})
            row += [cell.get(column, "–") for column in ("counted", 1, 8, 32)]
        rows.append(row)
    return [
        {
            "table": "cost",
            "title": "Relative to the single model (M = 3, a third of the heads, float32, CPU)",
            "command": "sh benchmarks/run_all.sh && python docs/make_tables.py",
            "columns": [
                "",
                *(f"ViT-{s} {c}" for s in "SB" for c in ("counted", "b1", "b8", "b32")),
            ],
            "rows": rows,
            "file": "docs/results/cost.md",
            "note": "Medians of paired ratios in one interleaved run; intervals (often ± 0.05 to "
            "0.1 on that 2-core machine) are on the page. `single readout` is one model whose last "
            "block runs for the class token alone: against *it*, the last two blocks cost about "
            "1.06 to 1.13. `packed ensemble` is a narrower network trained from scratch.",
        }
    ]


REAL = ("text", "cifar10", "imagenet", "zeroshot")
SHOWN = (
    "single",
    "Deep Ensembles",
    "MC dropout",
    "LoRA-Ensemble",
    "Hydra Circ",
    "Hydra select M=3",
)


def real_entries(root: Path = ROOT) -> list[dict[str, Any]]:
    """Show the main rows of the tables on real models, each the mean over draws."""
    found = []
    for name in REAL:
        path = root / "experiments" / "results" / f"table_{name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        columns = {
            "accuracy": ("accuracy", "raw", 1),
            "NLL": ("nll", "raw", 3),
            "NLL (scaled)": ("nll", "scaled", 3),
            "ECE": ("ece", "raw", 1),
            "AUROC seen": ("seen/msp/AUROC", "raw", 1),
            "AUROC unseen": ("unseen/msp/AUROC", "raw", 1),
            "FPR95 unseen": ("unseen/msp/FPR95", "raw", 1),
        }
        rows = []
        for row in record["rows"]:
            if row["name"] not in SHOWN and "trained with" not in row["name"]:
                continue
            cells = [row["name"], f"{row['cost']:.2f} x"]
            for key, kind, digits in columns.values():
                values = [draw[kind][key] for draw in row["draws"]]
                cells.append(f"{sum(values) / len(values):.{digits}f}")
            rows.append(cells)
        found.append(
            {
                "table": "real",
                "title": record["title"],
                "command": record["command"],
                "columns": ["", "cost", *columns],
                "rows": rows,
                "file": "docs/results.md",
            }
        )
    return found


def digits_entry(root: Path = ROOT) -> list[dict[str, Any]]:
    """Show the rivals on the digits, by a few columns of their record."""
    file = root / "experiments" / "results" / "digits_rivals.md"
    if not file.exists():
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    wanted = {
        "": "",
        "cost": "cost",
        "cls/Acc ↑": "accuracy",
        "post/cls/NLL ↓": "NLL (scaled)",
        "post/cal/ECE ↓": "ECE (scaled)",
        "ood/mean/AUROC ↑": "OOD AUROC",
        "ood/mean/FPR95 ↓": "FPR95",
        "score": "score",
    }
    places = [header.index(name) for name in wanted]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [
        {
            "table": "results",
            "title": "Digits, a small ViT, 359 test images, one seed: too small to rank rivals",
            "command": "python experiments/digits_rivals.py",
            "columns": list(wanted.values()),
            "rows": [[row[place] for place in places] for row in table],
            "file": "experiments/results/digits_rivals.md",
            "note": "Read the page's caveats: most differences are within their intervals, and "
            "Deep Ensembles stay ahead at 3 x the cost. Larger experiments are in `experiments/`.",
        }
    ]


def markdown(entry: dict[str, Any]) -> str:
    """Write one entry as a heading, a table and the command that made it."""
    columns = [str(cell) for cell in entry["columns"]]
    rows = [[str(cell) for cell in row] for row in entry["rows"]]
    wrong = [row for row in rows if len(row) != len(columns)]
    if wrong:
        raise ValueError(f"{entry['file']}: {len(columns)} columns but a row {wrong[0]}.")
    lines = [
        f"**{entry['title']}**" if entry.get("title") else "",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"`{entry['command']}` → [{entry['file']}]({entry['file']})",
    ]
    if entry.get("note"):
        lines.append(f"\n{entry['note']}")
    return "\n".join(lines).strip()


def fill(text: str, found: list[dict[str, Any]]) -> str:
    """Put tables between their markers; markers without an entry keep what they hold."""
    for name in {entry["table"] for entry in found}:
        body = "\n\n".join(markdown(entry) for entry in found if entry["table"] == name)
        pattern = rf"(<!-- table:{re.escape(name)} -->\n).*?(\n<!-- /table:{re.escape(name)} -->)"
        text, count = re.subn(pattern, lambda m, b=body: m[1] + b + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table {name!r}; expected one.")
    return text


def main() -> int:
    """Fill the tables, or with `--check` say whether they are up to date."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = fill(before, [*entries(), *cost_entry(), *real_entries(), *digits_entry()])
    if "--check" in sys.argv[1:]:
        sys.stdout.write("up to date\n" if after == before else "README.md is out of date\n")
        return int(after != before)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
