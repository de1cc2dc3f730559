"""Weather corruptions: snow, frost, fog (Hendrycks & Dietterich, ICLR 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Draws, at, corruptions, directional_blur, luminance, pixels, plasma, smooth, zoom


@corruptions.register("snow")
def snow(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Whiten the scene and let flakes fall, from both sides."""
    mean, std, size, threshold, radius, sigma, keep = at(
        images,
        severity,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    )
    flakes = zoom(mean + std * draws.normal(1, *images.shape[-2:]), max(1.0, pixels(images, size)))
    flakes = flakes.masked_fill(flakes < threshold, 0).clamp(0, 1)
    angles = draws.uniform(low=-135, high=-45)
    flakes = directional_blur(flakes, angles, pixels(images, radius), pixels(images, sigma))
    whiter = torch.maximum(images, luminance(images) * 1.5 + 0.5)
    return keep * images + (1 - keep) * whiter + flakes + flakes.rot90(2, (2, 3))


@corruptions.register("frost")
def frost(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Lay ice over the image; the original has photographs of ice, ours is drawn."""
    keep, ice = at(
        images,
        severity,
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    )
    layer = _ice(draws, (images.shape[-2], images.shape[-1]))
    if images.shape[1] == 3:
        tint = torch.tensor([0.86, 0.95, 1.0], device=images.device).view(1, 3, 1, 1)
        layer = layer * tint
    return keep * images + ice * layer


def _ice(draws: Draws, size: tuple[int, int]) -> Tensor:
    """Draw ice `[B, 1, H, W]` in [0, 1]: crystal needles (ridges of warped noise) in drifts."""
    drifts = plasma(draws, size, 2.0)
    warp = torch.cat([plasma(draws, size, 1.7), plasma(draws, size, 1.7)], 1).permute(0, 2, 3, 1)
    identity = torch.eye(2, 3, device=drifts.device).expand(len(drifts), 2, 3)
    grid = F.affine_grid(identity, [len(drifts), 1, *size], align_corners=False)
    needles: Tensor = torch.zeros_like(drifts)
    for share, cells in ((0.35, 8), (0.3, 16), (0.2, 32), (0.15, 64)):
        coarse = draws.uniform(1, cells + 1, cells + 1)
        field = F.interpolate(coarse, size=size, mode="bilinear", align_corners=True)
        field = F.grid_sample(
            field, grid + 0.5 * (warp - 0.5), padding_mode="reflection", align_corners=False
        )
        ridge = 1 - (2 * field - 1).abs()  # 1 where the field crosses its middle: thin bright lines
        needles = needles + share * ridge**4
    return (0.4 + 0.7 * drifts) * (0.45 + 1.2 * needles).clamp(0, 1)


@corruptions.register("fog")
def fog(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add a cloudy layer and dim the whole to the old brightest value."""
    amount, decay = at(
        images,
        severity,
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    )
    brightest = images.amax((1, 2, 3), keepdim=True)
    layer = plasma(draws, (images.shape[-2], images.shape[-1]), decay)
    return (images + amount * layer) * brightest / (brightest + amount)


@corruptions.register("spatter")
def spatter(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Splash water (severity 1 to 3) or mud (4, 5) on the lens (an extra)."""
    share, sigma, strength = at(
        images,
        severity,
        ((0.05, 0.7, 0.5), (0.08, 0.8, 0.5), (0.12, 1, 0.5), (0.1, 0.7, 0.9), (0.16, 0.6, 0.9)),
        ((0.1, 4, 0.6), (0.15, 3, 0.6), (0.2, 2, 0.6), (0.15, 3, 0.95), (0.25, 3, 0.95)),
    )
    field = _standard(draws.normal(1, *images.shape[-2:]), pixels(images, sigma))
    border = field.flatten(1).quantile(1 - share, dim=1).view(-1, 1, 1, 1)
    drops = strength * ((field - border) * 6).sigmoid()
    drops = drops.masked_fill(field < border, 0)
    colours = [175, 238, 238] if severity <= 3 else [63, 42, 20]
    colour = torch.tensor(colours, device=images.device).view(1, 3, 1, 1) / 255
    if images.shape[1] != 3:
        colour = colour.mean(1, keepdim=True)
    return images * (1 - drops) + colour * drops


def _standard(field: Tensor, sigma: float) -> Tensor:
    field = smooth(field, sigma)
    return field / field.std((2, 3), keepdim=True).clamp_min(1e-6)
