"""The embedded demo set: scikit-learn's digits, and outliers that are drawn by code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import imported
from .batches import Batch
from .corruptions.base import smooth
from .image_data import image_batch
from .loaders import Batches
from .splits import split

# Letters that resemble no digit, as lines between points (x to the right, y down, in the unit box)
_LETTERS: dict[str, list[list[tuple[float, float]]]] = {
    "A": [[(0.1, 1), (0.5, 0), (0.9, 1)], [(0.25, 0.65), (0.75, 0.65)]],
    "E": [[(0.9, 0), (0.15, 0), (0.15, 1), (0.9, 1)], [(0.15, 0.5), (0.75, 0.5)]],
    "F": [[(0.9, 0), (0.15, 0), (0.15, 1)], [(0.15, 0.5), (0.75, 0.5)]],
    "H": [[(0.15, 0), (0.15, 1)], [(0.85, 0), (0.85, 1)], [(0.15, 0.5), (0.85, 0.5)]],
    "K": [[(0.15, 0), (0.15, 1)], [(0.85, 0), (0.15, 0.55), (0.85, 1)]],
    "M": [[(0.05, 1), (0.1, 0), (0.5, 0.6), (0.9, 0), (0.95, 1)]],
    "N": [[(0.15, 1), (0.15, 0), (0.85, 1), (0.85, 0)]],
    "T": [[(0.05, 0), (0.95, 0)], [(0.5, 0), (0.5, 1)]],
    "U": [[(0.15, 0), (0.15, 0.8), (0.4, 1), (0.6, 1), (0.85, 0.8), (0.85, 0)]],
    "V": [[(0.1, 0), (0.5, 1), (0.9, 0)]],
    "W": [[(0.02, 0), (0.25, 1), (0.5, 0.35), (0.75, 1), (0.98, 0)]],
    "X": [[(0.1, 0), (0.9, 1)], [(0.9, 0), (0.1, 1)]],
}


@dataclass(frozen=True)
class Demo:
    """A small task with everything that an experiment needs.

    Args:
        train, validation, test: labelled data, stratified; 60 / 20 / 20 % by default.
        outliers: unlabelled scribbles, for searches that want OOD validation data.
        ood: unlabelled test outliers by name, of other kinds than `outliers`.
        class_names: names of the ten classes.
        mean, std: what the images were normalised with.
    """

    train: Batches
    validation: Batches
    test: Batches
    outliers: Batches
    ood: dict[str, Batches]
    class_names: list[str]
    mean: float = 0.5
    std: float = 0.5


def digits(
    size: int = 32,
    *,
    channels: int = 1,
    batch_size: int = 64,
    key: str | None = "pixel_values",
    outlier_count: int = 300,
    parts: tuple[float, float, float] = (0.6, 0.2, 0.2),
    seed: int = 0,
) -> Demo:
    """Load the 1,797 handwritten digits of scikit-learn, enlarged, with drawn outliers.

    The outliers are `letters` (drawn with the digits' pen), `rotated` (2, 3, 4, 5 and 7 of the test
    part on their side), `inverted` (white paper turned black), `textures` (stripes, checks, rings)
    and `noise`.

    Args:
        size: height and width of the images; the originals have 8 x 8 pixels.
        channels: 1, or 3 for hosts that want colour.
        batch_size: examples per batch.
        key: the host's name for images; None gives `(images, labels)`.
        outlier_count: most outliers per set (there are fewer rotated and inverted digits).
        parts: shares of the digits for training, validation and test.
        seed: seed of the split and of all drawings.
    """
    raw = imported("sklearn.datasets", "The digits of the demo", "demo").load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(raw.target, dtype=torch.long)

    def data(small: Tensor, targets: Tensor | None = None) -> Batches:
        large = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
        large = ((large - 0.5) / 0.5).expand(-1, channels, -1, -1).contiguous()

        def load(rows: Sequence[int]) -> Batch:
            chosen = list(rows)
            return image_batch(large[chosen], None if targets is None else targets[chosen], key)

        return Batches(load, range(len(large)), batch_size=batch_size, labels=targets)

    everything = data(images, labels)
    shares = dict(zip(("train", "validation", "test"), parts, strict=True))
    pieces = split(everything, shares, seed=seed)
    held_out = images[pieces["test"].indices]
    held_labels = labels[pieces["test"].indices]
    # a 0, 1, 6, 8 or 9 on its side may pass for a digit
    turned = held_out[torch.isin(held_labels, torch.tensor([2, 3, 4, 5, 7]))].rot90(1, (2, 3))
    makers: dict[str, Callable[[int, torch.Generator], Tensor]] = {
        "letters": _letters,
        "rotated": lambda count, _: turned[:count],
        "inverted": lambda count, _: 1 - held_out[:count],
        "textures": _textures,
        "noise": lambda count, generator: torch.rand((count, 1, 8, 8), generator=generator),
    }
    ood = {}
    for number, (name, make) in enumerate(makers.items(), start=1):
        generator = torch.Generator().manual_seed(seed * 100 + number)
        ood[name] = data(make(outlier_count, generator))
    scribbles = _scribbles(outlier_count, torch.Generator().manual_seed(seed * 100))
    names = [str(number) for number in range(10)]
    return Demo(
        pieces["train"],
        pieces["validation"],
        pieces["test"],
        data(scribbles),
        ood,
        class_names=names,
    )


def _letters(count: int, generator: torch.Generator) -> Tensor:
    """Draw letters `[count, 1, 8, 8]`: shaken, turned and drawn with a pen of varying width."""
    drawn = []
    for number in range(count):
        strokes = list(_LETTERS.values())[number % len(_LETTERS)]
        ends = [pair for line in strokes for pair in pairwise(line)]
        segments = torch.tensor(ends)
        segments = segments + 0.05 * torch.randn(segments.shape, generator=generator)
        drawn.append(_ink(segments, generator))
    return torch.stack(drawn)


def _scribbles(count: int, generator: torch.Generator) -> Tensor:
    """Draw random lines through 4 to 6 points, `[count, 1, 8, 8]`."""
    drawn = []
    for _ in range(count):
        corners = int(torch.randint(4, 7, (1,), generator=generator))
        points = torch.rand((corners, 2), generator=generator)
        points = (points - points.amin(0)) / (points.amax(0) - points.amin(0)).clamp_min(1e-6)
        drawn.append(_ink(torch.stack([points[:-1], points[1:]], 1), generator))
    return torch.stack(drawn)


def _ink(segments: Tensor, generator: torch.Generator) -> Tensor:
    """Draw segments `[n, 2, 2]` as the digits were made: on 32 x 32, then in 4 x 4 blocks."""
    turn, width = (torch.rand(2, generator=generator) - 0.5).tolist()
    angle = 0.4 * turn
    rotation = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    points = (segments - 0.5) @ rotation * torch.tensor([18.0, 25.0]) + 15.5
    axis = torch.arange(32.0)
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).view(-1, 1, 2)
    start, along = points[:, 0], points[:, 1] - points[:, 0]
    share = ((pixels - start) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)
    nearest = start + share.clamp(0, 1)[..., None] * along
    distance = (pixels - nearest).norm(dim=-1).amin(1).view(1, 1, 32, 32)
    ink = (2.2 + width - distance + 0.5).clamp(0, 1)
    return (F.avg_pool2d(ink, 4)[0] * 16).round() / 16


def _textures(count: int, generator: torch.Generator) -> Tensor:
    """Draw stripes, checks, rings and clouds at random scales and angles, `[count, 1, 8, 8]`."""
    axis = torch.linspace(-1, 1, 32)
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    drawn = []
    for number in range(count):
        frequency, angle, phase = torch.rand(3, generator=generator).tolist()
        frequency, angle, phase = 4 + 6 * frequency, math.pi * angle, 2 * math.pi * phase
        first = math.cos(angle) * across + math.sin(angle) * down
        second = math.cos(angle) * down - math.sin(angle) * across
        wave = torch.sin(frequency * first + phase)
        if number % 4 == 1:
            wave = wave * torch.sin(frequency * second + phase)
        elif number % 4 == 2:
            wave = torch.sin(frequency * (first**2 + second**2).sqrt() + phase)
        elif number % 4 == 3:
            cloud = smooth(torch.randn((32, 32), generator=generator), 3.0)
            wave = cloud / cloud.abs().max()
        drawn.append((0.5 + 0.5 * wave)[None])
    return F.avg_pool2d(torch.stack(drawn), 4)
