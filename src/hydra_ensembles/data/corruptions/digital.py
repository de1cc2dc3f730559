"""Digital corruptions: light, geometry and encoding (Hendrycks & Dietterich, ICLR 2019)."""

from __future__ import annotations

from io import BytesIO

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DataError
from .base import Draws, at, corruptions, smooth


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
    quality = at(images, severity, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7))
    import numpy as np
    from PIL import Image

    if images.shape[1] not in (1, 3):
        raise DataError(f"JPEG holds 1 or 3 channels, not {images.shape[1]}. Leave it out here.")
    bytes_ = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    decoded = []
    for pixels in bytes_:
        buffer = BytesIO()
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(
            buffer, "JPEG", quality=quality
        )
        decoded.append(np.asarray(Image.open(buffer)).reshape(pixels.shape))
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
