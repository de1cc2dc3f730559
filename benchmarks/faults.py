"""A hundred faults: each must end in the bit-equal result after a rerun, or in a reason.

    python benchmarks/faults.py [--seed 0] [--seconds 150] [--anew]

Work on small models (`fault_works.py`: build, distill, a circuit, fine-tuning, evaluation, saving)
is killed with SIGKILL or SIGTERM at random moments, runs into a full disk (a small tmpfs where we
may mount one, else the kernel's limit on a file's size), finds its files truncated, with flipped
bits or gone, with times of another century, runs out of memory, or loses the process that loads its
data. Every fault runs in a fork of this process, so that nothing is imported twice. Then the same
call runs again, undisturbed, in the same folder: its result must have the bits of one that nobody
disturbed, or it must refuse with a `HydraError`. Where a file was damaged, `doctor` is asked too.

It goes on where it stopped: a fault is drawn from its number and the seed. `--seconds` ends early.
Writes `benchmarks/results/faults.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_works import WORKS, Watched, loaded, two_ensembles

from hydra_ensembles._records import write_whole
from hydra_ensembles.errors import HydraError
from hydra_ensembles.hosts.tiny_vit import TinyViT
from hydra_ensembles.serving.folder_check import check_folder, repair

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # every file is brought to the disk
RESULTS = Path(__file__).parent / "results" / "faults.json"
EQUAL, REFUSED, BAD = "bit-equal after a rerun", "refused with a reason", "BAD"
KILLS = {"build": 12, "distill": 12, "circuit": 8, "finetune": 8}
PLAN: list[tuple[str, str]] = [
    *(("SIGKILL", work) for work, count in KILLS.items() for _ in range(count)),
    *(("SIGKILL", "save") for _ in range(8)),
    *(("SIGTERM", work) for work in ("build", "distill", "circuit", "finetune") for _ in range(2)),
    *(("full disk", work) for work in ("build", "distill", "circuit", "save") for _ in range(3)),
    *((way, work) for way in ("truncated", "flipped", "deleted") for work in ("build", "distill")
      for _ in range(2)),
    *((way, work) for way in ("truncated", "flipped", "deleted")
      for work in ("finetune", "circuit", "eval", "save")),
    *(("clock", work) for work in ("build", "distill")),
    *(("memory", work) for work in ("build", "distill", "eval")),
    *(("worker", "loader") for _ in range(3)),
]  # fmt: skip
"""Kind of fault and work, a hundred times."""


# --- processes -----------------------------------------------------------------------------------


def fork(work: Callable[[], str], said: Path) -> int:
    """Run work in a fork of this process; what it returns or refuses goes to a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()  # loading processes die with it
        result = {"result": work()}
        said.write_text(json.dumps(result))
        code = 0
    except HydraError as error:
        said.write_text(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        code = 3
    except BaseException:
        said.write_text(json.dumps({"error": traceback.format_exc()[-2000:]}))
    finally:
        os._exit(code)


def ended(child: int, said: Path, patience: float = 120) -> dict[str, str]:
    """Wait for a process; return what it said, `{"killed": ...}` or `{"error": "hangs"}`."""
    end = time.monotonic() + patience
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"error": "hangs"}
        time.sleep(0.005)
    if os.WIFSIGNALED(status):
        return {"killed": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(said.read_text())


def run(work: Callable[[], str], scratch: Path) -> dict[str, str]:
    """Run work undisturbed in a process of its own."""
    said = scratch / "said.json"
    said.unlink(missing_ok=True)
    return ended(fork(work, said), said)


def after(seconds: float, number: int) -> None:
    """Send this process a signal after so much processor time."""
    begun = time.process_time()

    def watch() -> None:
        while time.process_time() - begun < seconds:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


# --- faults: each leaves a folder disturbed, and says how ----------------------------------------


class Laboratory:
    """What undisturbed work gives, and how much processor time it takes."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.whole: dict[str, str] = {}
        self.length: dict[str, float] = {}
        self.folders: dict[str, Path] = {}

    def prepare(self, work: str) -> None:
        """Run work once, undisturbed."""
        if work in self.whole:
            return
        folder = self.scratch / f"whole-{work}"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if work == "save":
            first, second = two_ensembles()
            first.save_pretrained(folder)
            second.save_pretrained(self.scratch / "whole-second")
            self.whole[work] = loaded(folder)
            self.whole["second"] = loaded(self.scratch / "whole-second")
        else:
            found = run(lambda: WORKS[work](folder), self.scratch)
            if "result" not in found:
                raise SystemExit(f"{work} fails undisturbed: {found}")
            self.whole[work] = found["result"]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.length[work] = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        self.folders[work] = folder

    def fault(self, kind: str, work: str, draw: random.Random) -> dict[str, Any]:
        """Do one fault and the rerun; return what happened."""
        self.prepare(work)
        folder = self.scratch / "disturbed"
        shutil.rmtree(folder, ignore_errors=True)
        if work == "save":
            return self._save(kind, folder, draw)
        how = getattr(self, "_" + kind.lower().replace(" ", "_"))(work, folder, draw)
        doctor = None
        if kind in ("truncated", "flipped"):
            doctor = not check_folder(folder).is_sound
        again = run(lambda: WORKS[work](folder), self.scratch)
        return {**how, **self._judged(again, self.whole[work]), "doctor": doctor}

    def _judged(self, again: dict[str, str], *allowed: str) -> dict[str, str]:
        if again.get("result") in allowed:
            return {"outcome": EQUAL}
        if "refused" in again:
            return {"outcome": REFUSED, "reason": again["refused"]}
        return {"outcome": BAD, "reason": json.dumps(again)[-1500:]}

    def _killed(self, work: str, folder: Path, draw: random.Random, number: int) -> dict[str, Any]:
        for _ in range(20):
            moment = draw.uniform(0.02, 0.98) * self.length[work]

            def disturbed(moment: float = moment) -> str:
                after(moment, number)
                return WORKS[work](folder)

            found = ended(fork(disturbed, self.scratch / "said.json"), self.scratch / "said.json")
            if "killed" in found:
                left = sum(path.is_file() for path in folder.rglob("*")) if folder.exists() else 0
                return {"moment": round(moment, 3), "files left": left}
            shutil.rmtree(folder, ignore_errors=True)  # it was done before
        raise SystemExit(f"{work} ends before it can be killed")

    def _sigkill(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        return self._killed(work, folder, draw, signal.SIGKILL)

    def _sigterm(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        return self._killed(work, folder, draw, signal.SIGTERM)

    def _full_disk(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        """Let the disk be full, then make room."""
        folder.mkdir()
        size = draw.choice([4, 8, 16, 32, 64])
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        mounted = subprocess.run(mount, capture_output=True).returncode == 0

        def disturbed() -> str:
            if not mounted:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size * 256, size * 256))
            return WORKS[work](folder)

        try:
            found = run(disturbed, self.scratch)
            if mounted:
                kept = self.scratch / "kept"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(folder, kept)
        finally:
            if mounted:
                subprocess.run(["umount", str(folder)], check=True)
        if mounted:
            folder.rmdir()
            kept.rename(folder)
        if "error" in found:
            raise RuntimeError(found["error"])
        words = found.get("refused", "there was room enough")
        return {"disk": f"{size} kB{'' if mounted else ', by RLIMIT_FSIZE'}", "said": words[:200]}

    def _damaged(
        self, work: str, folder: Path, draw: random.Random, change: Callable[[Path], Any]
    ) -> dict[str, Any]:
        """Damage a file of finished work, or of work that was killed."""
        half = work in ("build", "distill", "finetune") and draw.random() < 0.5
        if half:
            for _ in range(20):
                self._killed(work, folder, draw, signal.SIGKILL)
                if any(path.is_file() for path in folder.rglob("*")):
                    break
        else:
            shutil.copytree(self.folders[work], folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if path.name != "README.md"]
        path = draw.choice(files)
        change(path)
        return {"file": path.relative_to(folder).as_posix(), "of": "half" if half else "whole"}

    def _truncated(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        return self._damaged(work, folder, draw, lambda path: truncate(path, draw))

    def _flipped(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        return self._damaged(work, folder, draw, lambda path: flip(path, draw))

    def _deleted(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        return self._damaged(work, folder, draw, Path.unlink)

    def _clock(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        """Kill the work, and let its files be of another century."""
        self._killed(work, folder, draw, signal.SIGKILL)
        moment = draw.choice([0, 4102444800])  # 1970, 2100
        for path in folder.rglob("*"):
            os.utime(path, (moment, moment))
        return {"files of": 1970 if moment == 0 else 2100}

    def _memory(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        """Let memory run out at a random call of the model, for good."""
        calls = draw.randrange(1, 30)

        def disturbed() -> str:
            forward, left = TinyViT.forward, [calls]

            def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise torch.OutOfMemoryError("out of memory: a fault")
                return forward(self, *args, **kwargs)

            TinyViT.forward = failing  # type: ignore[method-assign]
            return WORKS[work](folder)

        found = run(disturbed, self.scratch)
        if "error" in found:
            raise RuntimeError(found["error"])
        return {"call": calls, "said": found.get("refused", "it was done before")[:200]}

    def _worker(self, work: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        """Kill the process that loads the data."""
        victim = draw.randrange(45)

        def disturbed() -> str:
            Watched.victim = victim
            return WORKS[work](folder)

        found = run(disturbed, self.scratch)
        if "refused" not in found:
            raise RuntimeError(str(found))
        return {"example": victim, "said": found["refused"][:200]}

    def _save(self, kind: str, folder: Path, draw: random.Random) -> dict[str, Any]:
        """Disturb a save over an older ensemble: the old or the new one is there, or a reason."""
        shutil.copytree(self.folders["save"], folder)
        both = self.whole["save"], self.whole["second"]
        if kind == "SIGKILL":
            seconds = draw.uniform(0.005, 0.25)

            def saving() -> str:
                first, second = two_ensembles()
                after(seconds, signal.SIGKILL)
                while True:
                    second.save_pretrained(folder)
                    first.save_pretrained(folder)

            found = ended(fork(saving, self.scratch / "said.json"), self.scratch / "said.json")
            how: dict[str, Any] = {"moment": round(seconds, 3), **found}
        elif kind == "full disk":
            size = draw.choice([2, 8, 24, 40]) * 1024

            def saving() -> str:
                _, second = two_ensembles()
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                second.save_pretrained(folder)
                return "saved"

            found = run(saving, self.scratch)
            if "error" in found:
                raise RuntimeError(found["error"])
            how = {"disk": f"{size} bytes, by RLIMIT_FSIZE", "said": str(found)[:200]}
        else:
            path = draw.choice(sorted(p for p in folder.iterdir() if p.suffix != ".md"))
            {"truncated": truncate, "flipped": flip, "deleted": lambda p, _: p.unlink()}[kind](
                path, draw
            )
            how = {"file": path.name}
        there = loaded(folder)
        doctor = check_folder(folder)
        if there.startswith("refused"):
            how["mended"] = bool(repair(doctor)) and loaded(folder) in both
            judged = {"outcome": REFUSED, "reason": there}
        else:
            judged = {"outcome": EQUAL if there in both else BAD, "reason": there}
        found_it = there.startswith("refused") == (not doctor.is_sound)
        return {**how, **judged, "doctor": found_it if kind != "SIGKILL" else None}


def truncate(path: Path, draw: random.Random) -> None:
    """Cut a file anywhere."""
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flip(path: Path, draw: random.Random) -> None:
    """Flip one bit anywhere."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


# --- all of them ---------------------------------------------------------------------------------


def main() -> int:
    """Do the faults that are not done yet; print and write what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(PLAN))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end early")
    parser.add_argument("--anew", action="store_true", help="forget faults that were done")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # forks of a threaded process may hang
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    record: dict[str, Any] = {"seed": args.seed, "faults": {}}
    if args.out.exists() and not args.anew:
        saved = json.loads(args.out.read_text())
        if saved["seed"] == args.seed:
            record["faults"] = saved["faults"]
    order = list(range(len(PLAN)))
    random.Random(args.seed).shuffle(order)  # the first ones are of all kinds
    with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
        laboratory = Laboratory(Path(scratch))
        for number in order[: args.count]:
            before = record["faults"].get(str(number), {"outcome": BAD})  # a bad one is tried again
            if before["outcome"] != BAD or time.monotonic() - begun > args.seconds:
                continue
            kind, work = PLAN[number]
            try:
                draw = random.Random(f"{args.seed} {number}")
                found = laboratory.fault(kind, work, draw)
            except RuntimeError as error:
                found = {"outcome": BAD, "reason": str(error)[-1500:]}
            plain = json.loads(json.dumps(found).replace(f"{scratch}/", ""))  # no path of a machine
            record["faults"][str(number)] = {"fault": kind, "work": work, **plain}
            write_whole(args.out, json.dumps(summed(record), indent=1) + "\n")
            print(number, kind, work, found["outcome"], found.get("reason", "")[:300], flush=True)
    write_whole(args.out, json.dumps(summed(record), indent=1) + "\n")
    print(json.dumps(summed(record)["total"], indent=1))
    return int(any(f["outcome"] == BAD for f in record["faults"].values()))


def summed(record: dict[str, Any]) -> dict[str, Any]:
    """Add the figures to the record of all faults."""
    faults = list(record["faults"].values())
    asked = [fault["doctor"] for fault in faults if fault.get("doctor") is not None]
    table: dict[str, Counter[str]] = {}
    for fault in faults:
        table.setdefault(f"{fault['fault']}: {fault['work']}", Counter())[fault["outcome"]] += 1
    total = Counter(fault["outcome"] for fault in faults)
    return {
        "command": "python benchmarks/faults.py",
        "seed": record["seed"],
        "total": {
            "faults": len(faults),
            **{outcome: total[outcome] for outcome in (EQUAL, REFUSED, BAD)},
            "damaged files that doctor was asked about": len(asked),
            "of these found": sum(asked),
        },
        "by_fault": {name: dict(table[name]) for name in sorted(table)},
        "faults": record["faults"],
    }


if __name__ == "__main__":
    sys.exit(main())
