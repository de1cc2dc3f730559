"""Blur corruptions: focus, frosted glass, motion and zoom (Hendrycks & Dietterich, ICLR 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import base
from .base import Draws, at, corruptions, pixels


@corruptions.register("defocus_blur")
def defocus_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Convolve with a disk whose edge is soft: out of focus."""
    radius, edge = at(
        images,
        severity,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    )
    kernel = _disk(pixels(images, radius), edge, images)
    reach = kernel.shape[-1] // 2
    channels = images.shape[1]
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    return F.conv2d(padded, kernel.expand(channels, 1, -1, -1), groups=channels)


def _disk(radius: float, edge: float, like: Tensor) -> Tensor:
    """Return a normalised disk `[1, 1, k, k]`, blurred by `edge` pixels against aliasing."""
    reach = math.ceil(radius) + 1
    grid = torch.arange(-reach, reach + 1, dtype=like.dtype, device=like.device)
    inside = (grid[:, None] ** 2 + grid[None] ** 2 <= radius**2).to(like.dtype)
    kernel = base.gaussian_blur(inside[None, None], edge)
    return kernel / kernel.sum()


@corruptions.register("glass_blur")
def glass_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Blur, give every pixel the value of a random nearby one (several times), and blur again.

    The original swaps pixels one after another, so that each moves about twice per round; here all
    move at once, twice per round, which makes it one gather.
    """
    sigma, reach, rounds = at(
        images,
        severity,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    )
    sigma = pixels(images, sigma)
    farthest = max(0.75, pixels(images, reach))  # rounded below, so that some pixels always move
    height, width = images.shape[-2:]
    down = torch.arange(height, device=images.device)[:, None].expand(len(images), height, width)
    across = torch.arange(width, device=images.device).expand(len(images), height, width)
    for _ in range(2 * rounds):
        moves = draws.uniform(2, height, width, low=-farthest, high=farthest).round().long()
        down = (down + moves[:, 0]).clamp(0, height - 1)
        across = (across + moves[:, 1]).clamp(0, width - 1)
    flat = (down * width + across).flatten(1)[:, None].expand(-1, images.shape[1], -1)
    moved = base.gaussian_blur(images, sigma).flatten(2).gather(2, flat).view_as(images)
    return base.gaussian_blur(moved, sigma)


@corruptions.register("motion_blur")
def motion_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Smear along a random direction within 45 degrees of the horizontal."""
    radius, sigma = at(
        images,
        severity,
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    )
    angles = draws.uniform(low=-45, high=45)
    return base.directional_blur(images, angles, pixels(images, radius), pixels(images, sigma))


@corruptions.register("zoom_blur")
def zoom_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Average enlargements about the centre, up to a factor: moving towards the scene."""
    largest = at(images, severity, (1.05, 1.1, 1.15, 1.2, 1.25), (1.1, 1.15, 1.2, 1.24, 1.3))
    factors = torch.linspace(1, largest, 11).tolist()
    return (images + sum(base.zoom(images, factor) for factor in factors)) / (len(factors) + 1)


@corruptions.register("gaussian_blur")
def gaussian_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Convolve with a Gaussian (an extra, not among the fifteen)."""
    sigma = at(images, severity, (0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6))
    return base.gaussian_blur(images, pixels(images, sigma))
