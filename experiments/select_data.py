"""The images of the selection experiments (texts are in real_data.py).

Calibration / validation / test are the first, second and third image of every class by sorted file
name; texture classes are split between validation and test.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_ensembles.data.batches import Batches

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEXTURES = ("banded", "braided", "bumpy", "crosshatched")  # `cobwebbed` is close to a class


def need(path: Path) -> Path:
    """Return the path, or stop with what is missing."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: pass --data, the folder that holds it.")
    return path


def normalized(pixels: Tensor) -> Tensor:
    """Normalise images in [0, 1]."""
    shape = (1, 3, 1, 1)
    return (pixels - torch.tensor(MEAN).view(shape)) / torch.tensor(STD).view(shape)


def images(
    files: Sequence[Path], labels: Sequence[int] | None = None, *, size: int = 32
) -> Batches:
    """Return data over image files of 224 x 224 (others are resized and cropped)."""
    from PIL import Image

    targets = None if labels is None else torch.tensor(labels)

    def one(path: Path) -> Tensor:
        image = Image.open(path).convert("RGB")
        if image.size != (224, 224):
            scale = 224 / min(image.size)
            wide = [max(224, round(side * scale)) for side in image.size]
            image = image.resize((wide[0], wide[1]), Image.Resampling.BICUBIC)
            left, top = (wide[0] - 224) // 2, (wide[1] - 224) // 2
            image = image.crop((left, top, left + 224, top + 224))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def load(rows: Sequence[int]) -> Any:
        batch = normalized(torch.stack([one(files[row]) for row in rows]).float() / 255)
        return (batch, targets[list(rows)]) if targets is not None else (batch,)

    return Batches(load, range(len(files)), batch_size=size, labels=targets)


def imagenet(root: Path) -> dict[str, Batches]:
    """Return calibration, validation and test: one image a class each."""
    folder = need(root / "imagenet-val-3k")
    with (folder / "labels.csv").open() as file:
        rows = sorted((row["file"], int(row["label"])) for row in csv.DictReader(file))
    seen: dict[int, int] = {}
    parts: dict[str, list[tuple[str, int]]] = {"calibration": [], "validation": [], "test": []}
    for name, label in rows:
        parts[list(parts)[seen.get(label, 0)]].append((name, label))
        seen[label] = seen.get(label, 0) + 1
    return {
        part: images([folder / "images" / n for n, _ in pairs], [y for _, y in pairs])
        for part, pairs in parts.items()
    }


def textures(root: Path) -> dict[str, Batches]:
    """Return the texture classes."""
    return {kind: images(sorted(need(root / "textures" / kind).iterdir())) for kind in TEXTURES}


def other_images(root: Path, count: int) -> dict[str, Batches]:
    """Return families that no search sees: MNIST, CIFAR-10 upscaled, uniform and Gaussian noise."""
    from PIL import Image

    raw = gzip.decompress(need(root / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    digits = torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
    rows = np.array(Image.open(need(root / "cifar10" / "test_batch.png")))
    cifar = torch.from_numpy(rows[..., :3].reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2)

    def upscaled(small: Tensor) -> Batches:
        def load(chosen: Sequence[int]) -> Any:
            pixels = small[list(chosen)].float().expand(-1, 3, -1, -1) / 255
            large = torch.nn.functional.interpolate(pixels, size=224, mode="bicubic")
            return (normalized(large.clamp(0, 1)),)

        return Batches(load, range(count))

    def noise(chosen: Sequence[int]) -> Any:
        out = []
        for row in chosen:
            generator = torch.Generator().manual_seed(10_000 + row)
            kind = torch.rand if row % 2 else torch.randn
            pixels = kind(3, 224, 224, generator=generator)
            out.append(pixels if row % 2 else (0.5 + 0.25 * pixels).clamp(0, 1))
        return (normalized(torch.stack(out)),)

    return {
        "mnist": upscaled(digits[:count]),
        "cifar10": upscaled(cifar[:count]),
        "noise": Batches(noise, range(count // 2)),
    }


def deit(root: Path) -> torch.nn.Module:
    """Return DeiT-tiny."""
    import timm
    from safetensors.torch import load_file

    model = timm.create_model("deit_tiny_patch16_224", pretrained=False)
    model.load_state_dict(load_file(need(root / "deit-tiny" / "model.safetensors")))
    return model.eval()
