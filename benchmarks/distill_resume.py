"""Kill `distill` with SIGKILL at random moments, resume it, and compare the weights bit by bit.

    python benchmarks/distill_resume.py [--kills 10] [--seed 0]

Three small Vision Transformers teach three members on digits: once above a frozen trunk whose
outputs are remembered, once with the trunk trained too. A run is killed again and again, some
milliseconds after a random number of its steps (every fifth time while the teachers answer), and
goes on from its folder each time until it is done; then the next run starts, until there were ten
kills. Every run must end with the weights, temperature and history of one that nobody stopped.
Writes `benchmarks/results/distill-resume.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import circuit_data
import torch

import hydra_ensembles as hydra
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.data import digits
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.training import DISTILL

SHAPE = TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24)


def run(folder: Path | None, trunk_rate: float, on_step: Any = None) -> str:
    """Distil; return all that must be the same again."""
    data = digits(16, seed=0)
    teachers = [TinyViT(SHAPE, seed=seed).eval() for seed in (1, 2, 3)]
    student = hydra.distill(
        TinyViT(SHAPE, seed=0).eval(),
        teachers,
        data.train.subset(range(128), batch_size=32),
        validation=data.validation.subset(range(100)),
        max_cost=1.5,
        settings=replace(DISTILL, views=2, trunk_rate=trunk_rate),
        epochs=6,
        learning_rate=2e-3,
        folder=folder,
        save_every=2,
        progress=False,
        on_step=on_step,
    )
    history = student.record["training"]["history"]
    return json.dumps([model_fingerprint(student), student.temperature, history])


def in_a_process(
    folder: Path, rate: float, answer: Path, steps: int | None, seconds: float
) -> bool:
    """Run in a process that kills itself after so many steps and seconds; tell whether it did."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            done = []

            def watch() -> None:
                while steps is not None and len(done) < steps:
                    time.sleep(0.0005)
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGKILL)

            if steps is not None:
                threading.Thread(target=watch, daemon=True).start()
            answer.write_text(run(folder, rate, done.append))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit("a run failed")
    return False


def left(folder: Path) -> dict[str, int]:
    """Say what a killed run left: answers of teachers, steps of the checkpoint."""
    from hydra_ensembles.training.checkpoint import read_checkpoint

    saved = read_checkpoint(folder) if folder.exists() else None
    answers = len(list(folder.glob("answers/*.npy")))
    return {"answers": answers, "step": 0 if saved is None else saved[1]["step"]}


def measure(rate: float, kills: int, seed: int) -> dict[str, Any]:
    """Kill runs `kills` times in all; compare each that ends with one that nobody stopped."""
    whole = run(None, rate)
    moments = random.Random(seed)
    lives: list[list[dict[str, int]]] = []
    equal = 0
    while sum(map(len, lives)) < kills:
        with tempfile.TemporaryDirectory() as scratch:
            folder, answer = Path(scratch) / "state", Path(scratch) / "answer.json"
            left_over: list[dict[str, int]] = []
            lives.append(left_over)
            killed = True
            while killed:
                so_far = sum(map(len, lives))
                early = so_far % 5 == 0  # while the teachers answer
                steps = 0 if early else moments.randint(1, 7)
                seconds = moments.uniform(0.02, 0.1) if early else moments.uniform(0.0, 0.02)
                killed = in_a_process(
                    folder, rate, answer, None if so_far >= kills else steps, seconds
                )
                if killed:
                    left_over.append(left(folder))
            equal += answer.read_text() == whole
    return {
        "trunk": "trained" if rate else "frozen, its outputs remembered",
        "kills": sum(map(len, lives)),
        "runs": len(lives),
        "left after each kill, by run": lives,
        "bit-equal runs": equal,
    }


def main() -> None:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=circuit_data.RESULTS / "distill-resume.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # forks of a threaded process may hang
    runs = [measure(rate, args.kills, args.seed) for rate in (0.0, 1.0)]
    circuit_data.write(
        {
            "command": "python benchmarks/distill_resume.py",
            "what": "distill killed by SIGKILL at random moments, resumed, compared bit by bit",
            "machine": circuit_data.machine(),
            "runs": runs,
        },
        args.out,
    )
    if any(found["bit-equal runs"] != found["runs"] for found in runs):
        raise SystemExit("a resumed run differs")


if __name__ == "__main__":
    main()
