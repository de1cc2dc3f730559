"""What became lighter, before and now: copies of `predict`, work of teachers; one table of all.

    python benchmarks/before_after.py            # measures, then prints the table
    python benchmarks/before_after.py --table    # prints the table from the files

Both are counted, not timed, so that the machine does not matter. Copies and waits are those of a
pretended device (`tests/devices`) beyond the host's own. The sources before come from the history
of the repository. The table also has the memory, size and time that `saving_memory.py`,
`install_size.py` and `novelty_cost.py` measure. Writes `benchmarks/results/before-after.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
COPIES = "b2ce952"
"""The commit that changed the copies; its tests also run with the sources before it."""
VIEWS = "043a9e2"
"""The commit that changed what teachers are asked."""
CASES = ("plain", "novelty and policy", "all, on text", "folded, novelty")
TEACHERS = """
import inspect
import torch
import hydra_ensembles as hydra
from hydra_ensembles.hosts.tiny_vit import TinyViT

rows = 0

def count(module, inputs, output):
    global rows
    rows += len(inputs[0])

teachers = [TinyViT(seed=seed).eval() for seed in range(3)]
images = torch.randn(32, 1, 16, 16, generator=torch.Generator().manual_seed(0))
for teacher in teachers:
    teacher.register_forward_hook(count)
outliers = "ood" if "ood" in inspect.signature(hydra.distill).parameters else "outliers"
options = {"epochs": 1, outliers: None, "calibrate": False, "progress": False}
hydra.distill(TinyViT(seed=0), teachers, [images], **options)
print("@", rows)
"""


def extract(commit: str, path: str, folder: Path) -> Path:
    """Write a folder of the repository as it was at a commit; return where it is."""
    command = ["git", "archive", "--format=tar", commit, path]
    content = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    return folder / path


def run(code: list[str], *places: Path) -> Any:
    """Run Python with the packages of some folders; return the JSON that follows an @."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-W", "ignore", *code]
    done = subprocess.run(command, env=environment, cwd=places[-1], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.rpartition("@")[2])


def beyond_host(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the copies and waits of a batch that is on the device, without those of the host."""
    return {
        name: {
            kind: max(0, case["from device"].get(kind, 0) - case["host"].get(kind, 0))
            for kind in ("to device", "to host", "waits")
        }
        for name, case in found.items()
        if name in CASES
    }


def measure(folder: Path) -> dict[str, Any]:
    """Count copies and teachers' rows with the sources before and now."""
    count = ["-m", "tests.devices.predictions"]
    old = folder / "copies"
    tests = extract(COPIES, "tests", old).parent
    before = run(count, extract(f"{COPIES}~1", "src", old), tests)
    teachers = {
        "before": run(["-c", TEACHERS], extract(f"{VIEWS}~1", "src", folder / "views"), folder),
        "now": run(["-c", TEACHERS], ROOT / "src", folder),
    }
    return {
        "command": "python benchmarks/before_after.py",
        "before": {"copies": f"{COPIES}~1", "teachers": f"{VIEWS}~1"},
        "copies": {
            "before": beyond_host(before),
            "now": beyond_host(run(count, ROOT / "src", ROOT)),
        },
        "rows of three teachers, 32 images, one epoch": teachers,
    }


def table() -> str:
    """Return the table, from the files of all commands."""

    def read(name: str) -> Any:
        path = RESULTS / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    rows: list[tuple[str, Any, Any, str]] = []
    counted = read("before-after")
    if counted:
        for name in CASES:
            before, now = (counted["copies"][when][name] for when in ("before", "now"))
            text = "{to device} / {to host} / {waits}"
            cells = (text.format_map(before), text.format_map(now))
            rows.append((f"`predict`, {name}: to device / to host / waits", *cells, "before_after"))
        ((what, asked),) = (
            (key, value) for key, value in counted.items() if key.startswith("rows")
        )
        rows.append((f"`distill`: {what}", asked["before"], asked["now"], "before_after"))
    memory = read("saving-memory")
    for step in ("save bert", "load bert", "save llama", "load llama"):
        cells = tuple(f"{memory[when][step]['peak']:.2f} x" for when in ("before", "after"))
        rows.append((f"peak memory, {step}, of the weights", *cells, "saving_memory"))
    size = read("install-size")
    if size:
        megabytes = [size[when]["rows"]["core"]["megabytes"] for when in ("before", "now")]
        rows.append(
            ("installed without torch, MB", *(f"{x:.0f}" for x in megabytes), "install_size")
        )
        for name, times in size["import seconds"].items():
            cells = (f"{times['before']:.2f}", f"{times['now']:.2f}")
            rows.append((f"`{name}`, s", *cells, "install_size"))
    cost = read("novelty-cost")
    for name, old in cost["before"].items():
        if name in cost.get("now", {}):
            ratios = (old["of_shortest"], cost["now"][name]["with / without"]["of_shortest"])
            cells = tuple(f"{ratio:.2f} x" for ratio in ratios)
            rows.append((f"novelty and policy, {name}", *cells, "novelty_cost"))
    lines = ["| what | before | now | `python benchmarks/` |", "|---|---:|---:|---|"]
    lines += [f"| {what} | {old} | {new} | `{file}.py` |" for what, old, new, file in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table of the files only")
    if not parser.parse_args().table:
        with tempfile.TemporaryDirectory() as folder:
            record = measure(Path(folder))
        write_whole(RESULTS / "before-after.json", json.dumps(record, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
