"""Several processes save different ensembles into one folder at once, and one loads it meanwhile.

    python benchmarks/two_writers.py [--rounds 200] [--savers 3] [--seconds 900] [--name now]

Each round starts with a folder that holds an ensemble. All savers get the word at once and save
their own ensemble over it (other weights, other masks, another temperature, of the same shapes).
When they are done, the folder must load as exactly one of the ensembles. A reader loads the folder
all the time. What comes out is *right* (one of the ensembles), *mixed* (parts of two), *refused* (a
`HydraError`) or a *raw error*. `--seconds` ends early. The library is the one that Python imports,
so `PYTHONPATH` chooses which one is measured, and `--name` under which name its counts are kept.

Writes `benchmarks/results/two-writers.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as hydra
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.errors import HydraError
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

RESULTS = Path(__file__).parent / "results" / "two-writers.json"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the disk is not what is measured


def ensemble(number: int) -> hydra.HydraEnsemble:
    """Return an ensemble whose weights, masks and temperature are those of its number."""
    host = TinyViT(TinyViTConfig(layers=4, heads=4), seed=number).eval()
    full = [1, 1, 1, 1]
    masks = []
    for member in range(2):
        kept = [int((head + number + 2 * member) % 4 < 2) for head in range(4)]
        masks.append(hydra.HeadMask([full, full, kept, kept]))
    made = hydra.fuse(host, masks)
    made.temperature = 1.0 + number
    return made


def parts_of(made: hydra.HydraEnsemble) -> dict[str, str]:
    """Return what tells ensembles apart, part by part."""
    return {
        "weights": model_fingerprint(made.host),
        "masks": str([mask.tolist() for mask in made.masks]),
        "temperature": str(made.temperature),
    }


def outcome(folder: Path, known: list[dict[str, str]]) -> str:
    """Load a folder and say what it is."""
    try:
        found = parts_of(hydra.HydraEnsemble.from_pretrained(folder))
    except HydraError as error:
        return f"refused: {type(error).__name__}"
    except Exception as error:
        return f"raw error: {type(error).__name__}"
    return "right" if found in known else "mixed"


def saver(number: int) -> None:
    """Save over every folder that is named on standard input; say how it went."""
    made = ensemble(number)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            made.save_pretrained(line.strip())
            print("saved", flush=True)
        except HydraError as error:
            print(f"refused: {type(error).__name__}", flush=True)
        except Exception as error:
            print(f"raw error: {type(error).__name__}", flush=True)


def reader(known: list[dict[str, str]]) -> None:
    """Load the folder that was named last on standard input, again and again; count at its end."""
    counts: Counter[str] = Counter()
    folder: Path | None = None
    ended = threading.Event()

    def listen() -> None:
        nonlocal folder
        for line in sys.stdin:
            folder = Path(line.strip())
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    while not ended.is_set():
        if folder is None:
            time.sleep(0.01)
        else:
            counts[outcome(folder, known)] += 1
    print(json.dumps(counts), flush=True)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start this file in another role and wait until it is ready."""
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str], text: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(rounds: int, savers: int, seconds: float, home: Path) -> dict[str, Any]:
    """Run all rounds; return the counts."""
    made = [ensemble(number) for number in range(savers + 1)]
    known = [parts_of(one) for one in made]
    made[0].save_pretrained(home / "first")
    workers = [start("--saver", str(number)) for number in range(1, savers + 1)]
    watcher = start("--reader", str(savers))
    folders: Counter[str] = Counter()
    saves: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(rounds):
        folder = home / f"round-{number}"
        shutil.copytree(home / "first", folder)
        tell(watcher, folder)
        for worker in workers:
            tell(worker, folder)
        saves.update(hear(worker) for worker in workers)
        folders[outcome(folder, known)] += 1
        if time.monotonic() - began > seconds:
            break
    for process in (watcher, *workers):
        assert process.stdin is not None
        process.stdin.close()
    reads = json.loads(hear(watcher))
    for process in (watcher, *workers):
        process.wait(60)
    return {
        "savers": savers,
        "rounds": sum(folders.values()),
        "folders_after_overlapping_saves": dict(folders),
        "saves": dict(saves),
        "loads_meanwhile": reads,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--savers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--name", default="now", help="Key of these counts in the output.")
    parser.add_argument("--home", default=MEMORY, help="Where the folders are made.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--saver", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.saver is not None:
        saver(given.saver)
    elif given.reader is not None:
        reader([parts_of(ensemble(number)) for number in range(given.reader + 1)])
    else:
        with tempfile.TemporaryDirectory(dir=given.home) as home:
            found = measure(given.rounds, given.savers, given.seconds, Path(home))
        print(json.dumps(found, indent=1))
        both = json.loads(given.output.read_text()) if given.output.exists() else {}
        both[given.name] = found
        given.output.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
