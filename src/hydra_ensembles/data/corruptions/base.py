"""What corruptions share: the registry, seeded draws by example, sizes, and a few filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DataError
from ...registry import Registry

T = TypeVar("T")
Channels = float | Sequence[float] | Tensor


class Draws:
    """Random numbers for a batch, one seed per example: equal for every batch size and device."""

    def __init__(self, seeds: Tensor, device: torch.device | str = "cpu") -> None:
        self.seeds, self.device = seeds, device
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds.tolist()]

    def __len__(self) -> int:
        return len(self._generators)

    def each(self, draw: Callable[[torch.Generator, int], Tensor]) -> Tensor:
        """Stack `draw(generator, row)` of every example."""
        rows = [draw(generator, row) for row, generator in enumerate(self._generators)]
        return torch.stack(rows).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers `[batch, *shape]`."""
        return self.each(lambda generator, _: torch.randn(shape, generator=generator))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw uniform numbers `[batch, *shape]`."""
        return self.each(
            lambda generator, _: torch.rand(shape, generator=generator) * (high - low) + low
        )

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """Draw whole numbers in `low..high-1`, `[batch, *shape]`."""
        return self.each(lambda generator, _: torch.randint(low, high, shape, generator=generator))

    def permutations(self, count: int) -> Tensor:
        """Draw a permutation of `count` things for every example, `[batch, count]`."""
        return self.each(lambda generator, _: torch.randperm(count, generator=generator))


@dataclass(frozen=True)
class Normalisation:
    """What images were normalised with: a number or one per channel; None for pixels in [0, 1]."""

    mean: Channels | None
    std: Channels | None

    @classmethod
    def of(cls, data: Any, mean: Channels | None, std: Channels | None) -> Normalisation:
        """Return what is given, otherwise that of the data's own transform, if it has one."""
        transform = getattr(data, "transform", None)
        return cls(
            getattr(transform, "mean", None) if mean is None else mean,
            getattr(transform, "std", None) if std is None else std,
        )

    def to_pixels(self, images: Tensor) -> Tensor:
        """Undo the normalisation of images `[B, C, H, W]`."""
        return images * per_channel(self.std, images, 1.0) + per_channel(self.mean, images, 0.0)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """Normalise pixels `[B, C, H, W]` in [0, 1]."""
        shift, scale = per_channel(self.mean, pixels, 0.0), per_channel(self.std, pixels, 1.0)
        return (pixels - shift) / scale


def per_channel(values: Any, images: Tensor, default: float) -> Tensor:
    """Return a mean or std as a tensor `[1, C, 1, 1]` (or one number) on the images' device."""
    tensor = torch.as_tensor(default if values is None else values)
    tensor = tensor.to(images.device, images.dtype).reshape(1, -1, 1, 1)
    if tensor.shape[1] not in (1, images.shape[1]):
        raise DataError(
            f"mean or std has {tensor.shape[1]} channels, but the images have {images.shape[1]}."
        )
    return tensor


Corruption = Callable[[Tensor, int, Draws], Tensor]
corruptions: Registry[Corruption] = Registry("corruption")


def draw_seeds(count: int, generator: torch.Generator) -> Tensor:
    """Draw one seed for each of `count` examples, on the CPU."""
    return torch.randint(2**62, (count,), generator=generator)


def at(images: Tensor, severity: int, small: Sequence[T], large: Sequence[T]) -> T:
    """Pick a parameter: CIFAR-C's (made for 32 pixels) or ImageNet-C's (224), the nearer one."""
    return (small if is_small(images) else large)[severity - 1]


def is_small(images: Tensor) -> bool:
    """Return whether CIFAR-C's parameters fit better: below the geometric mean of 32 and 224."""
    return min(images.shape[-2:]) < math.sqrt(32 * 224)


def pixels(images: Tensor, length: float) -> float:
    """Scale a length in pixels from the size that the parameters were made for to this one."""
    return length * min(images.shape[-2:]) / (32 if is_small(images) else 224)


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Blur `[B, C, H, W]` with a Gaussian of `sigma` pixels (separable, edges repeated)."""
    if sigma <= 0:
        return images
    radius = max(1, math.ceil(3 * sigma))
    grid = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (grid / sigma) ** 2)
    kernel = kernel / kernel.sum()
    channels = images.shape[1]
    rows = kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    padded = F.pad(images, (radius,) * 4, mode="replicate")
    blurred = F.conv2d(padded, rows, groups=channels)
    return F.conv2d(blurred, rows.transpose(2, 3), groups=channels)


def smooth(field: Tensor, sigma: float) -> Tensor:
    """Blur a field `[..., H, W]` with a Gaussian of any width (by Fourier transform: it wraps)."""
    height, width = field.shape[-2:]
    down = torch.fft.fftfreq(height, device=field.device)[:, None]
    across = torch.fft.rfftfreq(width, device=field.device)[None]
    gain = torch.exp(-2 * (math.pi * sigma) ** 2 * (down**2 + across**2))
    smoothed: Tensor = torch.fft.irfft2(torch.fft.rfft2(field) * gain, s=(height, width))
    return smoothed


def directional_blur(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Smear each image along its own angle (degrees) with a one-sided Gaussian."""
    steps = max(2, round(radius) + 1)
    weights = torch.exp(-0.5 * (torch.arange(steps) / max(sigma, 1e-3)) ** 2)
    weights = weights / weights.sum()
    height, width = images.shape[-2:]
    reach = steps - 1
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    out = torch.zeros_like(images)
    for row, angle in enumerate(torch.deg2rad(angles).tolist()):
        for step, weight in enumerate(weights.tolist()):
            top = reach + round(step * math.sin(angle))
            left = reach + round(step * math.cos(angle))
            out[row].add_(padded[row, :, top : top + height, left : left + width], alpha=weight)
    return out


def zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge about the centre by `factor`, keeping the size."""
    height, width = images.shape[-2:]
    high, wide = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - high) // 2, (width - wide) // 2
    centre = images[..., top : top + high, left : left + wide]
    return F.interpolate(centre, size=(height, width), mode="bilinear", align_corners=False)


def plasma(draws: Draws, size: tuple[int, int], decay: float) -> Tensor:
    """Draw cloudy fields `[B, 1, H, W]` in [0, 1]: octaves of noise, each `decay` times weaker."""
    total: Tensor | float = 0.0
    octaves = max(1, math.ceil(math.log2(max(size))))
    for octave in range(1, octaves + 1):
        coarse = draws.uniform(1, 2**octave + 1, 2**octave + 1, low=-1)
        total = total + decay**-octave * F.interpolate(
            coarse, size=size, mode="bilinear", align_corners=True
        )
    assert isinstance(total, Tensor)
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (total - low) / (high - low).clamp_min(1e-6)
