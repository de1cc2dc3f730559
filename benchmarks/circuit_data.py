"""DeiT-tiny and images for the benchmarks of circuit searches: real ones, or random."""

from __future__ import annotations

import csv
import json
import platform
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.hosts import HostModel, host_model

RESULTS = Path(__file__).parent / "results"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Data = list[tuple[Tensor, Tensor]]


def deit(data: Path | None) -> HostModel:
    """Return DeiT-tiny, with real weights where there is data."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("deit_tiny_patch16_224", pretrained=False).eval()
    if data is not None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(data / "deit-tiny" / "model.safetensors"))
    host = host_model(model)
    _ = host.readout  # probed once, not part of a search
    return host


def images(data: Path | None, count: int, batch: int) -> Data:
    """Return labelled batches: the first validation images by name, or noise."""
    if data is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, 3, 224, 224, generator=generator)
        y = torch.randint(1000, (count,), generator=generator)
    else:
        x, y = _imagenet(data / "imagenet-val-3k", count)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def _imagenet(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    import numpy as np
    from PIL import Image

    with (folder / "labels.csv").open() as file:
        rows = sorted((row["file"], int(row["label"])) for row in csv.DictReader(file))[:count]
    pixels = [np.array(Image.open(folder / "images" / name).convert("RGB")) for name, _ in rows]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return x, torch.tensor([label for _, label in rows])


def machine() -> str:
    """Say what a benchmark ran on."""
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread(s), torch {torch.__version__}"


def write(record: dict[str, Any], path: Path) -> None:
    """Print a record and write it whole."""
    print(json.dumps(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1) + "\n")
