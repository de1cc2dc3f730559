"""Which structure a row of a table has, and what `measured_costs.py` measured of it.

Time depends on shapes, not on the values of weights: a temperature, another seed or other training
data leave it alone, so rows share measurements. Training a branch does not: members then own
norms, biases and classifiers, and these run by member.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NAME = "measured_costs.json"
PLAIN, READOUT = "single", "single, readout only"
SIZES = (1, 8)
ONE_MASK = {
    "circavg-single": "taylor-single",
    "random single": "Taylor single",
    "CircAvg single": "Taylor single",
}
"""One mask that keeps as many heads of the same blocks."""


def structure_of(table: str, row: str) -> str:
    """Return the name of the structure that a row of a table has."""
    if row.startswith("single") or row == "temperature":
        return READOUT if table == "zeroshot" or row == READOUT else PLAIN
    if row.startswith("ViLU"):
        return "ViLU"
    if row in ONE_MASK:
        return ONE_MASK[row]
    row = row.removesuffix(", member temperatures")
    trained = re.match(r"(Hydra.*?), trained", row)
    return f"{trained[1]}, trained" if trained else row


def read(folder: Path = RESULTS) -> dict[str, Any]:
    """Read the measurements by table; none when they were never made."""
    path = folder / NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def cell(measured: dict[str, Any], table: str, row: str) -> str:
    """Say the ratios of a row, batch 1 / batch 8; a dash for what was not timed."""
    found = measured.get(table, {}).get("structures", {}).get(structure_of(table, row))
    if found is None:
        return "-"
    return " / ".join(f"{found['ratios'][str(size)][0]:.2f}" for size in SIZES)


def lines(found: dict[str, Any], record: dict[str, Any]) -> list[list[str]]:
    """Return cells of all that was timed of a table: counted, ratios, rounds, rows that share."""
    sharing: dict[str, list[str]] = {}
    for row in record["rows"]:
        sharing.setdefault(structure_of(record["name"], row["name"]), []).append(row["name"])
    result = []
    for name, one in found["structures"].items():
        cells = [name, f"{one['counted']:.3f}"]
        for size in SIZES:
            value, low, high = one["ratios"][str(size)]
            cells.append(f"{value:.3f} [{low:.3f}, {high:.3f}]")
        cells.append(" / ".join(str(one["rounds"][str(size)]) for size in SIZES))
        also = [row for row in sharing.get(name, []) if row != name]
        result.append([*cells, "; ".join(also) or "-"])
    return result
