"""Distil the Deep Ensemble of CIFAR-10 hosts into one host: what Hydra may start from.

    python experiments/finetune_cifar10.py --data DATA --out HOSTS
    python experiments/distill_cifar10.py --data DATA --hosts HOSTS

The student starts from the mean of the hosts' weights (a uniform soup, Wortsman et al., 2022) and
learns the teachers' mean probabilities on their own training images, flipped and, every other one,
mixed with another (function matching, Beyer et al., 2022). No label and no other image is read.
Writes HOSTS/distilled, as `finetune_cifar10.py` does, after two rounds of falling learning rates,
the first of which leaves HOSTS/distilled-1. A killed run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from finetune_cifar10 import Images, load_host, load_split, prepare, read_images, save_host
from finetune_sst2 import write_json
from torch import Tensor

from hydra_ensembles import average_weights
from hydra_ensembles.training import finetune

ROUNDS = {"distilled-1": (4, 2e-4), "distilled": (4, 1e-4)}  # epochs, peak of the learning rate
RESULTS_FILE = Path(__file__).parent / "results" / "distill_cifar10.json"


class Mixed(Images):
    """Batches of images, flipped and every other one mixed with another, drawn anew each epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(1000 * (self.seed or 0) + self.epoch)
        for rows in torch.randperm(len(self.images), generator=draw).split(self.batch_size):
            flips, shares, alone = torch.rand(3, len(rows), 1, 1, 1, generator=draw)
            images = self.images[rows].float()
            images = torch.where(flips < 0.5, images.flip(-1), images)
            shares = torch.where(alone < 0.5, torch.ones(()), shares)
            yield prepare(shares * images + (1 - shares) * images.roll(1, 0)), self.labels[rows]


class Taught(Mixed):
    """Such batches with their teachers' mean probabilities as labels."""

    def __init__(self, images: Tensor, labels: Tensor, *, teachers: list[Any], seed: int) -> None:
        super().__init__(images, labels, seed=seed)
        self.teachers = teachers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, _ in super().__iter__():
            with torch.no_grad():
                taught = torch.stack([model(inputs).softmax(-1) for model in self.teachers]).mean(0)
            yield inputs, taught


def main() -> None:
    """Distil and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, required=True)
    args = parser.parse_args()
    if args.data is None:
        raise SystemExit("Where is the data? Pass --data or set HYDRA_DATA.")
    torch.set_num_threads(1)
    teachers = [load_host(args.hosts / f"seed{seed}") for seed in (0, 1, 2)]
    images, labels = read_images(args.data / "cifar10", "data_batch_1")
    train, validation = (load_split()[part] for part in ("train", "validation"))

    def log(info: Any) -> None:
        if info.step % 20 == 0:
            print(f"step {info.step}/{info.steps} loss {info.loss:.3f}", flush=True)

    student, rounds = average_weights(teachers), []
    for seed, (name, (epochs, rate)) in enumerate(ROUNDS.items()):
        folder = args.hosts / name
        if not folder.exists():
            member = finetune(
                student,
                Taught(images[train], labels[train], teachers=teachers, seed=seed),
                epochs=epochs,
                learning_rate=rate,
                weight_decay=0.05,
                validation=Images(images[validation], labels[validation]),
                folder=args.hosts / f"{name}.training",
                save_every=40,
                progress=False,
                on_step=log,
            )[0]
            write_json(args.hosts / f"{name}.training" / "history.json", member.history)
            save_host(member.model, folder)
        student = load_host(folder)
        history = json.loads((args.hosts / f"{name}.training" / "history.json").read_text())
        rounds.append({"epochs": epochs, "learning_rate": rate, "history": history})
    command = "python experiments/distill_cifar10.py --data DATA --hosts HOSTS"
    write_json(RESULTS_FILE, {"command": command, "rounds": rounds}, indent=2)


if __name__ == "__main__":
    main()
