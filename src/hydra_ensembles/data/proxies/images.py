"""Proxies of images: strong corruption, shuffled patches, mixtures, blur, tiled crops, noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..corruptions import corrupt_with
from ..corruptions.base import Draws, gaussian_blur, per_channel, plasma
from .base import image_proxy

STRONG = (
    "gaussian_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
    "pixelate",
    "elastic_transform",
    "saturate",
)


@dataclass(frozen=True)
class ImageContext:
    """How to undo the images' normalisation, and a bank of images in [0, 1] as partners."""

    mean: Tensor
    std: Tensor
    bank: Tensor

    @classmethod
    def of(cls, bank: Tensor, mean: Any, std: Any) -> ImageContext:
        """Estimate mean and std from the bank unless they are given.

        Over many photographs every channel contains black and white, so the lowest value is a
        normalised 0 and the highest a normalised 1.
        """
        bank = bank.float()
        if mean is None or std is None:
            low, high = bank.amin((0, 2, 3)), bank.amax((0, 2, 3))
            std = 1 / (high - low).clamp_min(1e-6)
            mean = -low * std
            if bank.min() >= 0 and bank.max() <= 1:  # pixels already
                mean, std = 0.0, 1.0
        mean, std = per_channel(mean, bank, 0.0), per_channel(std, bank, 1.0)
        return cls(mean, std, (bank * std + mean).clamp(0, 1))

    def to_pixels(self, images: Tensor) -> Tensor:
        """Undo the normalisation."""
        std, mean = self.std.to(images.device), self.mean.to(images.device)
        return (images.float() * std + mean).clamp(0, 1)

    def from_pixels(self, pixels: Tensor, like: Tensor) -> Tensor:
        """Normalise again, with the data type and device of `like`."""
        std, mean = self.std.to(like.device), self.mean.to(like.device)
        return ((pixels.clamp(0, 1) - mean) / std).to(like.dtype)


@image_proxy("corrupt")
def corrupt(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Apply two different corruptions of the highest severity, one after the other."""
    picks = draws.permutations(len(STRONG))[:, :2].cpu()
    out = pixels.clone()
    for turn in range(2):
        seeds = draws.seeds + turn
        for number in picks[:, turn].unique().tolist():
            rows = (picks[:, turn] == number).nonzero().flatten()
            out[rows] = corrupt_with(out[rows], STRONG[number], 5, seeds[rows])
    return out


@image_proxy("shuffle")
def shuffle(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Shuffle the patches of a grid of 3 x 3 to 8 x 8: parts of objects without the objects."""
    height, width = pixels.shape[-2:]
    grids = [grid for grid in range(3, 9) if height % grid == 0 and width % grid == 0]
    if not grids:  # sizes such as 31: shuffle a slightly smaller image and enlarge it
        even = F.interpolate(pixels, size=(max(4, height // 4 * 4), max(4, width // 4 * 4)))
        return F.interpolate(shuffle(even, draws, context), size=(height, width))
    picks = draws.integers(low=0, high=len(grids)).tolist()
    orders = draws.permutations(max(grids) ** 2)
    out = []
    for image, pick, order in zip(pixels, picks, orders, strict=True):
        grid = grids[pick]
        high, wide = height // grid, width // grid
        patches = image.view(-1, grid, high, grid, wide).permute(1, 3, 0, 2, 4).flatten(0, 1)
        patches = patches[order[order < grid**2]].view(grid, grid, -1, high, wide)
        out.append(patches.permute(2, 0, 3, 1, 4).reshape(image.shape))
    return torch.stack(out)


@image_proxy("mix")
def mix(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Blend with another image of the data, 35 to 65 % each: two objects, neither of them right."""
    others = draws.integers(low=0, high=len(context.bank)).tolist()
    share = draws.uniform(1, 1, 1, low=0.35, high=0.65)
    partners = []
    for image, number in zip(pixels, others, strict=True):
        partner = context.bank[number].to(image.device)
        if torch.equal(partner, image):  # itself
            partner = context.bank[(number + 1) % len(context.bank)].to(image.device).flip(-1)
        partners.append(partner)
    return share * pixels + (1 - share) * torch.stack(partners)


@image_proxy("blur")
def blur(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Blur with a Gaussian of 2 to 5 % of the side: coarse shapes without detail."""
    sides = draws.uniform(low=0.02, high=0.05) * min(pixels.shape[-2:])
    blurred = [
        gaussian_blur(image[None], max(0.7, sigma))
        for image, sigma in zip(pixels, sides.tolist(), strict=True)
    ]
    return torch.cat(blurred)


@image_proxy("tile")
def tile(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Repeat a crop of 12 to 30 % of the side, mirrored at its edges: the image's own texture."""
    height, width = pixels.shape[-2:]
    shares = draws.uniform(3).tolist()
    out = []
    for image, (size, down, across) in zip(pixels, shares, strict=True):
        side = max(2, round((0.12 + 0.18 * size) * min(height, width)))
        top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
        rows = _mirrored(height, side, pixels.device) + top
        columns = _mirrored(width, side, pixels.device) + left
        out.append(image[:, rows][:, :, columns])
    return torch.stack(out)


def _mirrored(length: int, side: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device) % (2 * side)
    return torch.where(places < side, places, 2 * side - 1 - places)


@image_proxy("sketch")
def sketch(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Draw the strongest 6 to 14 % of edges white on black, or inversely: strokes, no surfaces."""
    side = min(pixels.shape[-2:])
    smooth = gaussian_blur(pixels.mean(1, keepdim=True), max(0.7, 0.01 * side))
    padded = F.pad(smooth, (1, 1, 1, 1), mode="replicate")
    across = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]
    down = padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
    edges = across.hypot(down)
    shares = draws.uniform(low=0.06, high=0.14)
    kept = (shares * edges[0].numel()).long().clamp_min(1)
    ordered = edges.flatten(1).sort(1, descending=True).values
    threshold = ordered.gather(1, kept[:, None].to(ordered.device)).view(-1, 1, 1, 1)
    strokes = (edges > threshold).to(pixels.dtype)
    inverse = draws.integers(1, 1, 1, low=0, high=2).bool()
    return torch.where(inverse, 1 - strokes, strokes).expand_as(pixels)


@image_proxy("noise")
def noise(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Draw an image of noise: uniform, normal with the image's own colours, or cloudy."""
    channels, height, width = pixels.shape[1:]
    kinds = draws.integers(1, 1, 1, low=0, high=3)
    uniform = draws.uniform(channels, height, width)
    means, stds = pixels.mean((2, 3), keepdim=True), pixels.std((2, 3), keepdim=True)
    normal = means + stds * draws.normal(channels, height, width)
    cloudy = torch.cat([plasma(draws, (height, width), 1.6) for _ in range(channels)], 1)
    return torch.where(kinds == 0, uniform, torch.where(kinds == 1, normal, cloudy))
