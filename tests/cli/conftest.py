"""A saved host, a folder of digits and a folder of noise, made once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles.data import ImageTransform, digits
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

CONFIG = TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24)


def write_picture(path: Path, image: torch.Tensor) -> None:
    """Write [1, H, W] in [-1, 1] as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = ((image * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    Image.fromarray(pixels[0].numpy()).save(path)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `host` (a saved model), `digits`, `more` (other digits) and `noise`."""
    root = tmp_path_factory.mktemp("shelf")
    data = digits(16, seed=0)
    for number in range(64):
        image = next(iter(data.test.subset([number])))
        name = f"{int(image['labels'])}/{number:03}.png"
        write_picture(root / "digits" / name, image["pixel_values"][0])
    for number in range(64, 104):  # other digits, that nothing is built on
        image = next(iter(data.test.subset([number])))
        name = f"{int(image['labels'])}/{number:03}.png"
        write_picture(root / "more" / name, image["pixel_values"][0])
    noise = data.ood["noise"]
    for number in range(12):
        image = next(iter(noise.subset([number])))["pixel_values"][0]
        write_picture(root / "noise" / f"{number:03}.png", image)
    host = TinyViT(CONFIG, seed=1).eval()
    ensemble = hydra.fuse(host, [hydra.HeadMask.full(host)])
    ensemble.id2label = list("0123456789")
    ensemble.transform = ImageTransform(16, None, "bilinear", mean=(0.5,), std=(0.5,))
    ensemble.save_pretrained(root / "host")
    return root
