"""Damage folders and prediction records in every way we know; count what happens, by kind.

    python benchmarks/fuzz.py [--folders 7000] [--artefacts 3000] [--records 1000] [--seed 0]
                              [--seconds 150] [--anew]

Folders (`fuzz_folders.py`): of a small image and a small text ensemble and of one that runs the
host's own blocks, whole (calibrated, with novelty, a policy, a transform or a tokenizer). Values
and keys of `config.json` are changed, with the digest left stale and with a new one, as somebody
would who writes a folder by hand; bytes of every file are flipped, cut or exchanged; tensors and
the headers of safetensors files are changed; tokenizers name code and files; links and names lead
out of the folder; files are added. Artefacts (`fuzz_artefacts.py`): exported folders, their
contract and their ONNX program. Records (`fuzz_records.py`): lines for `hydra-ensembles predict`.

Everything is drawn from its number and the seed, and runs in a forked process of 4 GB: one that
crashes or hangs takes nothing with it and is counted. It goes on where it stopped; `--seconds` ends
early, and failures are tried again at the next start. Writes `benchmarks/results/fuzz.json`.

Wanted: no error that is not ours, none that shows at predict only, nothing loaded that the folder
does not say, nothing read outside the folder, no crash, no hang, no record without its line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_artefacts import Artefacts
from fuzz_folders import BAD, CRASHED, GOOD, HUNG, RAW, Folders, make_ensembles
from fuzz_records import fuzz_records

from hydra_ensembles._records import write_whole

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk is slow for many files
RESULTS = Path(__file__).parent / "results" / "fuzz.json"
PATIENCE = 60.0
"""Seconds after which a folder counts as one that hangs."""

One = Callable[[int], tuple[str, str, str]]


def in_forks(one: One, numbers: list[int]) -> Iterator[tuple[int, str, str, str]]:
    """Yield number, way, kind and error; a fork that dies or hangs is replaced by another."""
    left = list(numbers)
    while left:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            _work(one, left, writable)
        os.close(writable)
        ready: list[Any] = []
        try:
            with os.fdopen(readable, "rb", buffering=0) as lines:
                while left:
                    ready, _, _ = select.select([lines], [], [], PATIENCE)
                    line = lines.readline() if ready else b""
                    if not line:
                        break
                    yield tuple(json.loads(line))  # type: ignore[misc]
                    left.pop(0)
        finally:
            hung = bool(left) and not ready
            if left:  # it hangs, it crashed, or nobody asks for more
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if left:
            kind = HUNG if hung else CRASHED
            yield left.pop(0), "", kind, f"status {status}"


def _work(one: One, numbers: list[int], writable: int) -> None:
    """Do the work of a fork; never returns."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (max(used, pages) + 4 * 2**30,) * 2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # libraries talk about odd files
    with os.fdopen(writable, "w", buffering=1) as lines:
        for number in numbers:
            try:
                way, kind, error = one(number)
            except BaseException as wrong:  # a panic of a Rust library is no Exception
                way, kind, error = "", RAW, f"{type(wrong).__name__}: {wrong}"
            lines.write(json.dumps([number, way, kind, error[:300]]) + "\n")
    os._exit(0)


def add_up(done: dict[str, Any], found: tuple[int, str, str, str]) -> None:
    """Count one outcome."""
    number, way, kind, error = found
    done["count"] += 1
    done["total"][kind] = done["total"].get(kind, 0) + 1
    done["by_way"].setdefault(way, Counter())
    done["by_way"][way][kind] = done["by_way"][way].get(kind, 0) + 1
    if kind in BAD:
        done["failures"].append({"number": number, "way": way, "kind": kind, "error": error})


def forget_failures(done: dict[str, Any]) -> list[int]:
    """Take the failures out of the counts, to try them again: a fix then shows."""
    failures, done["failures"] = done["failures"], []
    for failure in failures:
        done["count"] -= 1
        done["total"][failure["kind"]] -= 1
        done["by_way"][failure["way"]][failure["kind"]] -= 1
    return [failure["number"] for failure in failures]


def empty() -> dict[str, Any]:
    """Return counts of nothing."""
    return {"count": 0, "total": dict.fromkeys((*GOOD, *BAD), 0), "by_way": {}, "failures": []}


def fuzz_folders(count: int, seed: int) -> dict[str, Any]:
    """Damage folders of ensembles in this process; return figures by way and kind of outcome."""
    done = empty()
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        folders = Folders(Path(place), seed)
        for number in range(count):
            add_up(done, (number, *folders.one(number)))
    return done


def main() -> int:
    """Run all parts, print the figures and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folders", type=int, default=7000)
    parser.add_argument("--artefacts", type=int, default=3000)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end early")
    parser.add_argument("--anew", action="store_true", help="forget what was done")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)  # forks of a threaded process may hang
    warnings.simplefilter("ignore")  # keys that are not known are told by a warning
    transformers.logging.set_verbosity(100)  # it talks about odd configs before we refuse
    end = time.monotonic() + args.seconds
    result: dict[str, Any] = {"seed": args.seed}
    if args.out.exists() and not args.anew:
        saved = json.loads(args.out.read_text())
        result = saved if saved["seed"] == args.seed else result
    kinds: dict[str, tuple[int, Callable[[Path], Any]]] = {
        "folders": (args.folders, lambda place: Folders(place, args.seed)),
        "artefacts": (args.artefacts, lambda place: Artefacts(place, args.seed)),
    }
    for part, (count, make) in kinds.items():
        done = result.setdefault(part, empty())
        tried = done["count"] >= count and not done["failures"]
        if tried or not count or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory(dir=MEMORY) as place:
            source = make(Path(place))
            new = range(done["count"], count)
            left = [*forget_failures(done), *new]
            for found in in_forks(source.one, left):
                add_up(done, found)
                if done["count"] % 100 == 0:
                    write_whole(args.out, json.dumps(result, indent=1) + "\n")
                if time.monotonic() > end:
                    break
        write_whole(args.out, json.dumps(result, indent=1) + "\n")
    if args.records > result.get("records", {}).get("count", 0) and time.monotonic() < end:
        with tempfile.TemporaryDirectory() as place:
            made = {name: folder for name, (folder, _) in make_ensembles(Path(place)).items()}
            result["records"] = fuzz_records(made, args.records, args.seed)
        write_whole(args.out, json.dumps(result, indent=1) + "\n")
    parts = [result[part] for part in ("folders", "artefacts", "records") if part in result]
    for part in parts:
        print(part["count"], json.dumps(part["total"], indent=2))
        for failure in part["failures"][:20]:
            print("  ", failure)
    return int(any(part["failures"] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
