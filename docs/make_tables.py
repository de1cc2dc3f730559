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
    after = fill(before, entries())
    if "--check" in sys.argv[1:]:
        sys.stdout.write("up to date\n" if after == before else "README.md is out of date\n")
        return int(after != before)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
