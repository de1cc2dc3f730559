"""Shifts: the common corruptions of ImageNet-C and CIFAR-C for images of any size, and of text.

Dan Hendrycks and Thomas Dietterich, *Benchmarking Neural Network Robustness to Common Corruptions
and Perturbations*, ICLR 2019. Reimplemented in torch: existing packages draw from global random
states, need one image at a time or one size, or do not run with current numpy. Parameters are
CIFAR-C's below 85 pixels and ImageNet-C's from there on; lengths in pixels scale with the image.
Frost is drawn, not photographed, so its results are not comparable with published ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import DataError
from ..batches import Batch, describe, images_of, with_images
from ..loaders import Data, Mapped
from ..text_files import TextBatches
from . import images as _images  # noqa: F401  (they register themselves)
from .base import Channels, Draws, Normalisation, draw_seeds
from .base import corruptions as corruptions
from .text import corrupt_texts as corrupt_texts
from .text import text_corruptions as text_corruptions

COMMON = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The fifteen; `gaussian_blur` and `saturate` are extras."""


def corrupt(
    images: Tensor, name: str, *, severity: int = 3, generator: torch.Generator | None = None
) -> Tensor:
    """Corrupt images `[B, C, H, W]` in [0, 1]; the result is in [0, 1] too.

    Args:
        images: floats in [0, 1] on any device.
        name: a registered corruption, see `COMMON`.
        severity: 1 to 5.
        generator: a CPU generator; one seed per example is drawn from it, so that the result does
            not depend on the batch size. By default a fresh one with seed 0.
    """
    generator = generator or torch.Generator().manual_seed(0)
    return corrupt_with(images, name, severity, draw_seeds(len(images), generator))


def corrupt_with(images: Tensor, name: str, severity: int, seeds: Tensor) -> Tensor:
    """Corrupt images `[B, C, H, W]` in [0, 1] with one seed per example."""
    function = corruptions[name]
    if severity not in range(1, 6):
        raise DataError(f"The severity is {severity}; expected 1 to 5.")
    if images.ndim != 4 or not images.is_floating_point():
        raise DataError(f"Expected float images [B, C, H, W] in [0, 1]; {describe(images)}.")
    low, high = images.min().item(), images.max().item()
    if not (math.isfinite(low) and math.isfinite(high) and low >= -0.01 and high <= 1.01):
        raise DataError(
            f"Images to corrupt must lie in [0, 1]; found values from {low:.3g} to {high:.3g}. "
            "Pass the mean and std that they were normalised with."
        )
    draws = Draws(seeds, images.device)
    return function(images.float().clamp(0, 1), severity, draws).clamp(0, 1).to(images.dtype)


def corrupted(
    data: Data,
    name: str,
    *,
    severity: int = 3,
    seed: int = 0,
    mean: Channels | None = None,
    std: Channels | None = None,
) -> Data:
    """Return data under a corruption, re-iterable and the same at every pass; labels stay.

    Args:
        data: batches of images, or text data made by our loaders (`text_file`) for a text
            corruption.
        name: a registered corruption of images, or of text (`typos`, `drop_words`, ...).
        severity: 1 to 5.
        seed: seed of the draw; the same for any batch size.
        mean, std: what the images were normalised with, a number or one per channel. By default
            those of the data's own transform if it has one, else the images must lie in [0, 1].
    """
    if name in text_corruptions and name not in corruptions:
        if not isinstance(data, TextBatches):
            raise DataError(
                f"The corruption {name!r} works on raw strings, which this data does not hold. "
                "Read the text with text_file(...), or call corrupt_texts(...) before the "
                "tokenizer."
            )
        return data.with_texts(corrupt_texts(data.texts, name, severity=severity, seed=seed))
    _ = corruptions[name]  # an unknown name fails here, not in the middle of a pass
    normalisation = Normalisation.of(data, mean, std)

    def start() -> Callable[[Batch], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def apply(batch: Batch) -> Batch:
            images = images_of(batch)
            if images is None:
                raise DataError(f"Expected a batch of images; {describe(batch)}.")
            pixels = normalisation.to_pixels(images)
            changed = corrupt(pixels, name, severity=severity, generator=generator)
            return with_images(batch, normalisation.from_pixels(changed))

        return apply

    return Mapped(data, start)
