"""Start of the command line against the libraries it is made of, in one interleaved run.

    python benchmarks/startup.py

Whole processes by the clock: the installed `hydra-ensembles --help` against `python -c "import
typer, rich"`, in an order that turns with every round. The figure is the median of the paired
ratios, with a bootstrap interval; the modules that only `--help` imports are listed beside it, for
they do not depend on the machine. Writes `benchmarks/results/startup.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.benchmark_result import paired_ratio

RESULTS = Path(__file__).parent / "results" / "startup.json"
SCRIPT = Path(sys.executable).with_name("hydra-ensembles")
LIBRARIES = "import typer, rich"
HELP = "from hydra_ensembles.cli.main import main; main(['--help'])"
WAYS: dict[str, list[str]] = {
    "import typer, rich": [sys.executable, "-c", LIBRARIES],
    "hydra-ensembles --help": [str(SCRIPT), "--help"],
    "python alone": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def modules(code: str) -> set[str]:
    """Return what is imported after running code in a new process."""
    code += "\nimport sys; print('\\n@', *sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.rpartition("@")[2].split())


def measure(rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for command in WAYS.values():  # compiled files and the disk cache are there for all
        seconds(command)
    for turn in range(rounds):
        order = list(WAYS.items())
        for name, command in order[turn % len(order) :] + order[: turn % len(order)]:
            times[name].append(seconds(command))
    base = times["import typer, rich"]
    ratios = {name: paired_ratio(times[name], base) for name in WAYS}
    return {
        name: {"ratio": round(found.value, 3), "interval": [round(x, 3) for x in found[1:]]}
        for name, found in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    record = {
        "command": "python benchmarks/startup.py",
        "what": "whole processes by the clock, relative to python -c 'import typer, rich'",
        "machine": f"{platform.machine()} CPU, Python {platform.python_version()}",
        "rounds": args.rounds,
        "ways": measure(args.rounds),
        "modules_of_help_alone": sorted(modules(HELP) - modules(LIBRARIES)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, json.dumps(record, indent=1) + "\n")
    for name, found in record["ways"].items():
        print(f"{name:24} {found['ratio']:.3f} x  {found['interval']}")
    print("imported by --help alone:", ", ".join(record["modules_of_help_alone"]))


if __name__ == "__main__":
    main()
