"""A task of seconds: which quarter of a small image is bright? Outliers are bright everywhere."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.training import finetune

CONFIG = TinyViTConfig(
    image_size=8, patch_size=4, width=24, heads=3, layers=2, mlp_width=36, classes=4
)
Batch = tuple[Tensor, Tensor]


def data(count: int = 128, seed: int = 0, noise: float = 0.8) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=draws)
    images = noise * torch.randn(count, 1, 8, 8, generator=draws)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[:, row : row + 4, column : column + 4] += 1
    return list(zip(images.split(32), labels.split(32), strict=True))


def outliers(count: int = 96, seed: int = 5) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return list((1 + 0.8 * torch.randn(count, 1, 8, 8, generator=draws)).split(32))


TRAIN, VALIDATION, TEST = data(512, seed=1), data(seed=2), data(seed=3)


@cache
def host() -> nn.Module:
    """A trained host that is shared: tests must not change it."""
    start = TinyViT(CONFIG, seed=0)
    return finetune(start, TRAIN, epochs=12, learning_rate=3e-3, progress=False)[0].model


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)
