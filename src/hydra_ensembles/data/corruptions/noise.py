"""Noise corruptions: what sensors and transmission add (Hendrycks & Dietterich, ICLR 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Draws, at, corruptions


@corruptions.register("gaussian_noise")
def gaussian_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add normal noise: low light."""
    scale = at(images, severity, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))
    return images + scale * draws.normal(*images.shape[1:])


@corruptions.register("shot_noise")
def shot_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Count photons: x -> Poisson(c x) / c."""
    photons = at(images, severity, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3))
    rates = (images * photons).cpu()
    return draws.each(lambda generator, row: torch.poisson(rates[row], generator)) / photons


@corruptions.register("impulse_noise")
def impulse_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Set a share of the values to 0 or 1: salt and pepper, bit errors."""
    share = at(images, severity, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))
    chance = draws.uniform(*images.shape[1:])
    return images.masked_fill(chance < share, 1.0).masked_fill(chance < share / 2, 0.0)


@corruptions.register("speckle_noise")
def speckle_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add noise in proportion to brightness (an extra, not among the fifteen)."""
    scale = at(images, severity, (0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6))
    return images * (1 + scale * draws.normal(*images.shape[1:]))
