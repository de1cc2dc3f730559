"""Pictures as arrays: resize, crop the centre, normalise. Pillow and numpy only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..registry import check_name

MOST_PIXELS = 64 * 10**6
"""A picture with more is not decoded: a small file can hold one that fills the memory."""


@dataclass(frozen=True)
class Pictures:
    """From pictures to the array that an exported model takes.

    Attributes:
        size: Height and width of the answer.
        crop: Share of the resized picture that the centre crop keeps; None squeezes the whole
            picture into the size instead.
        interpolation: `bicubic`, `bilinear`, `nearest`, ... as Pillow names them.
        mean, std: One per channel; their length (1 or 3) decides between grey and colour.
        most_pixels: Larger pictures are refused before they are decoded.
    """

    size: tuple[int, int]
    crop: float | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    most_pixels: int = MOST_PIXELS

    @classmethod
    def from_contract(cls, data: Mapping[str, Any]) -> Pictures:
        """Read the preprocessing of a contract."""
        resampling(data["interpolation"])
        return cls(
            (data["size"][0], data["size"][1]),
            data["crop"],
            data["interpolation"],
            tuple(data["mean"]),
            tuple(data["std"]),
        )

    def __call__(self, items: Sequence[Any]) -> np.ndarray:
        """Turn pictures, paths or pixels `[H, W, 3]` (uint8) into one array `[batch, C, H, W]`."""
        return np.stack([self._one(item) for item in items])

    def _one(self, item: Any) -> np.ndarray:
        from PIL import Image

        try:
            if isinstance(item, np.ndarray):
                return self._array(Image.fromarray(item))
            if isinstance(item, (str, os.PathLike)):
                with Image.open(Path(item)) as picture:
                    return self._array(picture)
            return self._array(item)
        except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
            if isinstance(error, DataError):
                raise
            name = f" {item}" if isinstance(item, (str, os.PathLike)) else ""
            raise DataError(f"Cannot read the image{name}: {error}.") from error

    def _array(self, picture: Any) -> np.ndarray:
        if picture.width * picture.height > self.most_pixels:
            raise DataError(
                f"A picture of {picture.width} x {picture.height} pixels has more than "
                f"{self.most_pixels}: it is not decoded. Make it smaller first."
            )
        return picture_array(
            picture,
            size=self.size,
            crop=self.crop,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )


def picture_array(
    picture: Any,
    *,
    size: tuple[int, int],
    crop: float | None,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
) -> np.ndarray:
    """Turn a PIL image into a normalised float32 array `[C, H, W]` (see `Pictures`)."""
    height, width = size
    picture = picture.convert("RGB" if len(mean) == 3 else "L")
    how = resampling(interpolation)
    if crop is None:
        picture = _resized(picture, (width, height), how)
    else:
        # shorter side to floor(size / crop), as timm and torchvision do
        scale = max(
            math.floor(height / crop) / picture.height, math.floor(width / crop) / picture.width
        )
        wide = max(width, int(picture.width * scale + 1e-6))
        high = max(height, int(picture.height * scale + 1e-6))
        picture = _resized(picture, (wide, high), how)
        left, top = round((wide - width) / 2.0), round((high - height) / 2.0)
        picture = picture.crop((left, top, left + width, top + height))
    pixels = np.asarray(picture, dtype=np.uint8).reshape(height, width, -1).transpose(2, 0, 1)
    scaled = pixels.astype(np.float32) / np.float32(255)
    centre, spread = (np.asarray(v, dtype=np.float32).reshape(-1, 1, 1) for v in (mean, std))
    return np.ascontiguousarray((scaled - centre) / spread)


def resampling(name: str) -> Any:
    """Return Pillow's resampling by name."""
    from PIL import Image

    check_name("interpolation", name.lower(), [kind.name.lower() for kind in Image.Resampling])
    return Image.Resampling[name.upper()]


def _resized(picture: Any, size: tuple[int, int], how: Any) -> Any:
    return picture if picture.size == size else picture.resize(size, how)
