"""Fine-tune DeiT-tiny on CIFAR-10 at 96 x 96, one host per seed (the base of its experiments).

    python experiments/finetune_cifar10.py --data DATA --out CHECKPOINTS/cifar10 --seeds 0 1 2

Each seed gives a folder `seed<n>`: `model.safetensors` (timm's state dict) and `config.json`, read
by `load_host`. A killed run resumes. Images are upscaled bicubically, position embeddings are
interpolated by timm. Split (`experiments/splits/cifar10.json`, seeded): of the 10,000 images of
`data_batch_1`, 1,000 are `validation`, drawn at random; the other 9,000 train. Accuracy is measured
on the first 2,000 images of `test_batch`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from finetune_sst2 import write_json
from torch import Tensor

SPLIT_FILE = Path(__file__).parent / "splits" / "cifar10.json"
RESULTS_FILE = Path(__file__).parent / "results" / "finetune_cifar10.json"
SIZE, VALIDATION, TEST = 96, 1000, 2000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which DeiT was trained with


def read_images(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return images `[10000, 3, 32, 32]` (bytes) and labels of a batch file."""
    import numpy as np
    from PIL import Image

    path = folder / f"{name}.png"
    if not path.exists():
        raise SystemExit(f"{path} is missing. Pass --data, the folder that holds cifar10.")
    with Image.open(path) as file:
        pixels = np.asarray(file.convert("RGB")).reshape(-1, 32, 32, 3)
    labels = folder / ("test_lables.json" if name.startswith("test") else "train_lables.json")
    numbers = json.loads(labels.read_text())[: len(pixels)]
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2), torch.tensor(numbers)


def prepare(images: Tensor) -> Tensor:
    """Scale bytes `[B, 3, 32, 32]` to normalised floats `[B, 3, 96, 96]`."""
    pixels = F.interpolate(images.float() / 255, size=SIZE, mode="bicubic", align_corners=False)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (pixels.clamp(0, 1) - mean) / std


class Images:
    """Batches of upscaled images; with a seed, shuffled and flipped anew each epoch."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, batch_size: int = 64, seed: int | None = None
    ) -> None:
        self.images, self.labels, self.batch_size, self.seed = images, labels, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, flips = torch.arange(len(self.images)), torch.zeros(len(self.images), dtype=bool)
        if self.seed is not None:
            draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
            order = torch.randperm(len(self.images), generator=draw)
            flips = torch.rand(len(self.images), generator=draw) < 0.5
        for rows in order.split(self.batch_size):
            images = self.images[rows]
            mirrored = flips[rows].view(-1, 1, 1, 1)
            yield prepare(torch.where(mirrored, images.flip(-1), images)), self.labels[rows]


def load_split() -> dict[str, list[int]]:
    """Read the split, making and saving it the first time."""
    if not SPLIT_FILE.exists():
        draw = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
        write_json(SPLIT_FILE, {"validation": sorted(draw[:VALIDATION].tolist())})
    validation = json.loads(SPLIT_FILE.read_text())["validation"]
    train = sorted(set(range(10_000)) - set(validation))
    return {"train": train, "validation": validation}


def new_host(data: Path, seed: int) -> Any:
    """Return DeiT-tiny for 96 x 96 images with a fresh, seeded classifier of 10 classes."""
    import timm

    weights = data / "deit-tiny" / "model.safetensors"
    if not weights.exists():
        raise SystemExit(f"{weights} is missing. Pass --data, the folder that holds deit-tiny.")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return timm.create_model(
            "deit_tiny_patch16_224",
            pretrained=True,
            pretrained_cfg_overlay={"file": str(weights)},
            num_classes=10,
            img_size=SIZE,
        )


def load_host(folder: Path) -> Any:
    """Return a fine-tuned host of this script, in evaluation mode."""
    import timm
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    model = timm.create_model(
        config["architecture"], num_classes=config["num_classes"], img_size=config["img_size"]
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def save_host(model: Any, folder: Path) -> None:
    """Save weights and config, beside and renamed."""
    from safetensors.torch import save_file

    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, beside / "model.safetensors")
    config = {
        "architecture": "deit_tiny_patch16_224",
        "num_classes": 10,
        "img_size": SIZE,
        "mean": MEAN,
        "std": STD,
    }
    write_json(beside / "config.json", config, indent=2)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def run_seed(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Fine-tune, save and evaluate one seed."""
    from hydra_ensembles.data.running import collect_logits
    from hydra_ensembles.training import finetune

    images, labels = read_images(args.data / "cifar10", "data_batch_1")
    split = load_split()

    def log(info: Any) -> None:
        if info.step % 20 == 0:
            print(f"seed {seed} step {info.step}/{info.steps} loss {info.loss:.3f}", flush=True)

    def part(name: str, seed: int | None = None) -> Images:
        return Images(images[split[name]], labels[split[name]], seed=seed)

    work = args.out / f"seed{seed}.training"
    member = finetune(
        new_host(args.data, seed),
        part("train", seed),
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=seed,
        weight_decay=0.05,
        validation=part("validation"),
        folder=work,
        save_every=40,
        progress=False,
        on_step=log,
    )[0]
    save_host(member.model, args.out / f"seed{seed}")
    test_images, test_labels = read_images(args.data / "cifar10", "test_batch")
    logits, truth = collect_logits(
        member.model, Images(test_images[:TEST], test_labels[:TEST]), need_labels=True
    )
    assert truth is not None
    shutil.rmtree(work)
    return {
        "seed": seed,
        "history": member.history,
        "steps": member.steps,
        "test_accuracy": round((logits[:, 0].argmax(1) == truth).float().mean().item(), 4),
        "test_nll": round(F.cross_entropy(logits[:, 0], truth).item(), 4),
    }


def main() -> None:
    """Run the seeds one after another; those already in the results are skipped."""
    parser = argparse.ArgumentParser(description="Fine-tune DeiT-tiny on CIFAR-10 at 96 x 96.")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    args = parser.parse_args()
    if args.data is None:
        raise SystemExit("Where is the data? Pass --data or set HYDRA_DATA.")
    records = json.loads(args.results.read_text())["seeds"] if args.results.exists() else []
    for seed in args.seeds:
        if any(r["seed"] == seed for r in records) and (args.out / f"seed{seed}").exists():
            continue
        record = run_seed(args, seed)
        records = [*(r for r in records if r["seed"] != seed), record]
        command = "python experiments/finetune_cifar10.py --data DATA --out CHECKPOINTS/cifar10"
        settings = {"epochs": args.epochs, "learning_rate": args.learning_rate, "batch_size": 64}
        ordered = sorted(records, key=lambda r: r["seed"])
        write_json(
            args.results, {"command": command, "settings": settings, "seeds": ordered}, indent=2
        )
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
