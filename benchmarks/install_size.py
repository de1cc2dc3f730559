"""Installed size and import time, now and before the optional packages became extras.

    python benchmarks/install_size.py                  # before: the commit 618d195

Nothing is installed. The packages that an install brings are followed through the metadata of this
environment, which must have them all (`.[dev]`), and the sizes of their files are added up; hard
links and compiled files count as pip installs them. torch and what only torch needs is a row of its
own: its size depends on CUDA, not on us. Import times are whole processes, in an order that turns
with every round, against `python -c pass`. Writes `benchmarks/results/install-size.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hydra_ensembles._records import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "install-size.json"
SELF = "hydra-ensembles"
STATEMENTS = {
    "import hydra_ensembles": "import hydra_ensembles",
    "hydra_ensembles.HydraEnsemble": "import hydra_ensembles; hydra_ensembles.HydraEnsemble",
    "hydra_ensembles.build": "import hydra_ensembles; hydra_ensembles.build",
    "hydra_ensembles.evaluate": "import hydra_ensembles; hydra_ensembles.evaluate",
}
MEGABYTE = 10**6


def at_commit(revision: str, path: str) -> bytes:
    """Return a file of the repository, or a folder as a tar archive, at a commit."""
    command = ["git", "archive", "--format=tar", revision, path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout


def requirements(project: dict[str, Any], extra: str | None) -> list[Requirement]:
    """Return what a project needs, its own extras resolved."""
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    found = []
    for requirement in map(Requirement, listed):
        if canonicalize_name(requirement.name) == SELF:
            for other in requirement.extras:
                found += requirements(project, other)
        else:
            found.append(requirement)
    return found


def closure(wanted: list[Requirement], missing: set[str]) -> set[str]:
    """Return the names of all packages that these bring, by the metadata of this environment."""
    found: set[str] = set()
    todo = [(requirement.name, frozenset(requirement.extras)) for requirement in wanted]
    done = set()
    while todo:
        entry = todo.pop()
        if entry in done:
            continue
        done.add(entry)
        name, extras = canonicalize_name(entry[0]), entry[1]
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            missing.add(name)
            continue
        found.add(name)
        for text in needs:
            need = Requirement(text)
            environments = [{**default_environment(), "extra": e} for e in ("", *extras)]
            if need.marker is None or any(need.marker.evaluate(e) for e in environments):
                todo.append((need.name, frozenset(need.extras)))
    return found


def size(name: str) -> int:
    """Return the bytes of a package's files, without compiled Python."""
    files = distribution(name).files or []
    paths = (Path(str(file.locate())) for file in files if file.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())


def installed(project: dict[str, Any], extras: list[str | None]) -> dict[str, Any]:
    """Return number of packages and megabytes of installs, torch and its own needs apart."""
    missing: set[str] = set()
    core = requirements(project, None)
    of_torch = closure([Requirement("torch")], missing)
    rest = closure([r for r in core if canonicalize_name(r.name) != "torch"], missing)
    rows = {}
    for extra in extras:
        wanted = core + ([] if extra is None else requirements(project, extra))
        names = closure(wanted, missing) - (of_torch - rest)
        megabytes = sum(map(size, names)) / MEGABYTE
        rows[extra or "core"] = {"packages": len(names), "megabytes": round(megabytes, 1)}
    own = sum(map(size, of_torch - rest)) / MEGABYTE
    return {"rows": rows, "torch": round(own, 1), "not installed here": sorted(missing)}


def seconds(code: str, source: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - start


def import_times(sources: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Return medians in seconds beyond an empty process, interleaved."""
    ways = {("python alone", ""): ("pass", ROOT)}
    ways |= {
        (name, when): (code, source)
        for name, code in STATEMENTS.items()
        for when, source in sources.items()
    }
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for code, source in ways.values():  # compiled files and the disk cache are there for all
        seconds(code, source)
    for turn in range(rounds):
        order = list(ways.items())
        for way, (code, source) in order[turn % len(order) :] + order[: turn % len(order)]:
            times[way].append(seconds(code, source))
    empty = statistics.median(times.pop(("python alone", "")))
    found: dict[str, dict[str, float]] = {}
    for (name, when), values in times.items():
        found.setdefault(name, {})[when] = round(statistics.median(values) - empty, 3)
    return found


def table(record: dict[str, Any]) -> str:
    """Return the two tables of the page, as Markdown."""
    before, now = record["before"], record["now"]
    lines = ["| `pip install` | packages | MB |", "|---|---:|---:|"]
    core = before["rows"]["core"]
    lines.append(f"| before: no extra | {core['packages']} | {core['megabytes']:.0f} |")
    base = now["rows"]["core"]["megabytes"]
    for extra, row in now["rows"].items():
        name = "now: no extra" if extra == "core" else f"now: `[{extra}]`"
        more = "" if extra == "core" else f" (+{row['megabytes'] - base:.0f})"
        lines.append(f"| {name} | {row['packages']} | {row['megabytes']:.0f}{more} |")
    lines += ["", "| seconds beyond an empty process | before | now |", "|---|---:|---:|"]
    for name, times in record["import seconds"].items():
        lines.append(f"| `{name}` | {times['before']:.2f} | {times['now']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="618d195", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    now = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(fileobj=BytesIO(at_commit(args.before, "src")), mode="r") as archive,
    ):
        archive.extractall(folder, filter="data")
        with tarfile.open(fileobj=BytesIO(at_commit(args.before, "pyproject.toml"))) as one:
            member = one.extractfile("pyproject.toml")
            assert member is not None
            before = tomllib.loads(member.read().decode())["project"]
        users = ("transformers", "timm", "openclip", "hosts", "train", "report", "demo", "data")
        record = {
            "command": f"python benchmarks/install_size.py --before {args.before}",
            "machine": f"{platform.machine()} CPU, Python {platform.python_version()}",
            "rounds": args.rounds,
            "before": installed(before, [None]),
            "now": installed(now, [None, *users, "serve", "export"]),
            "import seconds": import_times(
                {"before": Path(folder) / "src", "now": ROOT / "src"}, args.rounds
            ),
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, json.dumps(record, indent=1) + "\n")
    print(table(record))
    print(
        f"\ntorch and what only torch needs, in every row besides: {record['now']['torch']:.0f} MB"
    )


if __name__ == "__main__":
    main()
