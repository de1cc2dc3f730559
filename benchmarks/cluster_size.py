"""Size a cluster from a measured cost per row.

    python benchmarks/cluster_size.py --rows 1e6 1e9 --hours 1 24

Reads the processor seconds per row of one process from `results/processes.json` (or `--seconds`, of
your own model: processor seconds per row on one core) and says how many core hours so many rows
take, how many cores finish them in time, and what the output weighs. `--overhead` is the share of
the time in which a core does not run the model: starting, reading, waiting for the last part.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "processes.json"
BYTES = 36
"""Of an answer in Parquet without the columns that come along (16,384 rows of 1,000 classes)."""


def seconds_per_row(path: Path) -> float:
    """Return the processor seconds that one process spent per row, in its best round."""
    record = json.loads(path.read_text())
    return min(record["timing"]["1"]["processor_seconds"]) / record["rows"]


def size(rows: float, seconds: float, hours: float, overhead: float) -> dict[str, float]:
    """Return core hours, cores that are needed, and what one core alone would take."""
    core_hours = rows * seconds / 3600 / (1 - overhead)
    return {
        "rows": rows,
        "hours": hours,
        "core_hours": core_hours,
        "cores": math.ceil(core_hours / hours),
        "output_gigabytes": rows * BYTES / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, default=RESULT)
    parser.add_argument("--seconds", type=float, help="processor seconds per row, on one core")
    parser.add_argument("--rows", type=float, nargs="+", default=[1e6, 1e9])
    parser.add_argument("--hours", type=float, nargs="+", default=[1, 24])
    parser.add_argument("--overhead", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seconds = given.seconds or seconds_per_row(given.source)
    found = [
        size(rows, seconds, hours, given.overhead) for rows in given.rows for hours in given.hours
    ]
    if given.json:
        print(json.dumps({"seconds_per_row": seconds, "sizes": found}, indent=1))
        return
    print(f"{1 / seconds:.1f} rows per second and core ({1000 * seconds:.1f} ms each)\n")
    print("| rows | core hours | finished in | cores | output |")
    print("|---:|---:|---:|---:|---:|")
    for one in found:
        print(
            f"| {one['rows']:,.0f} | {one['core_hours']:,.0f} | {one['hours']:g} h "
            f"| {one['cores']:,} | {one['output_gigabytes']:,.2g} GB |"
        )


if __name__ == "__main__":
    main()
