"""The corruptions of images: noise, blur, weather, digital (Hendrycks & Dietterich, ICLR 2019)."""

from __future__ import annotations

import math
from io import BytesIO

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DataError
from .base import (
    Draws,
    at,
    corruptions,
    directional_blur,
    gaussian_blur,
    pixels,
    plasma,
    smooth,
    zoom,
)

# --- noise: what sensors and transmission add


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


# --- blur: focus, frosted glass, motion and zoom


@corruptions.register("defocus_blur")
def defocus_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Convolve with a disk whose edge is soft: out of focus."""
    radius, edge = at(
        images,
        severity,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    )
    radius = pixels(images, radius)
    reach = math.ceil(radius) + 1
    grid = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    inside = (grid[:, None] ** 2 + grid[None] ** 2 <= radius**2).to(images.dtype)
    disk = gaussian_blur(inside[None, None], edge)  # against aliasing
    kernel = (disk / disk.sum()).expand(images.shape[1], 1, -1, -1)
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    return F.conv2d(padded, kernel, groups=images.shape[1])


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
    moved = gaussian_blur(images, sigma).flatten(2).gather(2, flat).view_as(images)
    return gaussian_blur(moved, sigma)


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
    return directional_blur(images, angles, pixels(images, radius), pixels(images, sigma))


@corruptions.register("zoom_blur")
def zoom_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Average enlargements about the centre, up to a factor: moving towards the scene."""
    largest = at(images, severity, (1.05, 1.1, 1.15, 1.2, 1.25), (1.1, 1.15, 1.2, 1.24, 1.3))
    factors = torch.linspace(1, largest, 11).tolist()
    return (images + sum(zoom(images, factor) for factor in factors)) / (len(factors) + 1)


@corruptions.register("gaussian_blur")
def gaussian(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Convolve with a Gaussian (an extra, not among the fifteen)."""
    sigma = at(images, severity, (0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6))
    return gaussian_blur(images, pixels(images, sigma))


# --- weather


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
    grey = images.mean(1, keepdim=True)
    if images.shape[1] == 3:  # ITU-R 601
        weights = torch.tensor([0.299, 0.587, 0.114], device=images.device, dtype=images.dtype)
        grey = (images * weights.view(1, 3, 1, 1)).sum(1, keepdim=True)
    whiter = torch.maximum(images, grey * 1.5 + 0.5)
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


# --- digital: light, geometry and encoding


@corruptions.register("brightness")
def brightness(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Raise the value of every pixel, keeping hue and saturation: day light."""
    amount = at(images, severity, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5))
    value = images.amax(1, keepdim=True)
    raised = (value + amount).clamp(0, 1)
    # black has no hue: it becomes grey
    return torch.where(value > 0, images * (raised / value.clamp_min(1e-6)), raised)


@corruptions.register("contrast")
def contrast(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Pull every channel towards its mean."""
    keep = at(images, severity, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * keep + means


@corruptions.register("elastic_transform")
def elastic_transform(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Move three points at random (an affine map), then every pixel along a smooth random field."""
    # strength, smoothness and shift as shares of the image's side
    strength, smoothness, shift = at(
        images,
        severity,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        (
            (2.18, 0.76, 0.109),
            (2.18, 0.087, 0.218),
            (0.0545, 0.0109, 0.0218),
            (0.0763, 0.0109, 0.0218),
            (0.131, 0.0109, 0.0218),
        ),
    )
    count, _, height, width = images.shape
    side = min(height, width)
    # the map that takes the moved corners back, in grid_sample's coordinates (-1 to 1)
    corners = torch.tensor([[2, 2, 1], [2, -2, 1], [-2, -2, 1]], device=images.device) / 3.0
    corners[:, 2] = 1.0
    moves = draws.uniform(3, 2, low=-2 * shift, high=2 * shift)
    moved = torch.cat([corners[:, :2] + moves, torch.ones_like(moves[..., :1])], 2)
    theta = torch.linalg.solve(moved, corners[:, :2].expand(count, 3, 2)).transpose(1, 2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    if strength:
        field = smooth(draws.uniform(2, height, width, low=-1), smoothness * side)
        scale = torch.tensor([2 / width, 2 / height], device=images.device).view(1, 2, 1, 1)
        grid = grid + (field * strength * side * scale).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


@corruptions.register("pixelate")
def pixelate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Shrink by averaging and enlarge again in blocks."""
    share = at(images, severity, (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25))
    height, width = images.shape[-2:]
    fewer = (max(1, int(height * share)), max(1, int(width * share)))
    return F.interpolate(F.interpolate(images, size=fewer, mode="area"), size=(height, width))


@corruptions.register("jpeg_compression")
def jpeg_compression(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Encode as JPEG of low quality and decode."""
    import numpy as np
    from PIL import Image

    quality = at(images, severity, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7))
    if images.shape[1] not in (1, 3):
        raise DataError(f"JPEG holds 1 or 3 channels, not {images.shape[1]}. Leave it out here.")
    bytes_ = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    decoded = []
    for frame in bytes_:
        buffer = BytesIO()
        Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame).save(
            buffer, "JPEG", quality=quality
        )
        decoded.append(np.asarray(Image.open(buffer)).reshape(frame.shape))
    out = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)
    return out.to(images.device, images.dtype) / 255


@corruptions.register("saturate")
def saturate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Scale the saturation, keeping hue and value (an extra, not among the fifteen)."""
    factor, offset = at(
        images,
        severity,
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    )
    value, lowest = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    saturation = (value - lowest) / value.clamp_min(1e-6)
    wanted = (saturation * factor + offset).clamp(0, 1)
    # distance from the value scales with the saturation; grey has no hue to saturate
    scale = torch.where(saturation > 0, wanted / saturation.clamp_min(1e-6), torch.ones_like(value))
    return value - (value - images) * scale
