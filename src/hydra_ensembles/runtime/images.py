"""Images: the only opener, and resize, crop the centre, normalise. Pillow and numpy only."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..registry import check_name

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Decoders that may see a file; Pillow has more, some of which start other programs."""

MOST_PIXELS = 64 * 10**6
"""An image with more is not decoded: a small file can hold one that fills the memory."""

MOST_ASPECT = 100
"""Longer side over shorter side, at most: a resize of the shorter side makes the longer one grow
as much, and a few hundred bytes can hold an image of 100,000 x 1 pixels."""

WHOLE = 32
"""Up to so many times the pixels of the answer, the whole image is resized and then cropped, as
timm and torchvision do; beyond, only the part that the crop keeps, with other rounding."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What turns an image upright, by its EXIF orientation."""


class PixelLimitError(DataError):
    """An image has more pixels than may be decoded."""


def open_image(source: Any, *, most_pixels: int = MOST_PIXELS, draft: bool = False) -> Any:
    """Return a decoded PIL image (of several frames the first), its size checked before.

    Args:
        source: A path, the bytes of a file, pixels `[H, W, 3]` or `[H, W]` (uint8), or a PIL image.
        most_pixels: Larger images are refused.
        draft: Decode JPEGs small, which is quicker and enough to find broken ones.

    Raises:
        PixelLimitError: The image has more than `most_pixels`.
        DataError: It is broken, not of `FORMATS`, or longer than `MOST_ASPECT` allows.
    """
    from PIL import Image

    name = f" {source!s:.500}" if isinstance(source, (str, os.PathLike)) else ""
    try:
        if name and not Path(source).is_file():  # a pipe or a device would never end
            raise OSError("there is no such file")
        if isinstance(source, (bytes, bytearray)):
            if not source:
                raise OSError("it is empty")
            source = io.BytesIO(source)
        elif not name:
            if not hasattr(source, "convert"):
                if not hasattr(source, "__array__"):
                    raise TypeError(
                        f"expected a path, bytes, pixels or PIL's, found {source!r:.60}"
                    )
                source = Image.fromarray(np.asarray(source))
            check_size(source, most_pixels)
            source.load()
            return source
        with Image.open(source, formats=FORMATS) as image:
            check_size(image, most_pixels, name)
            if draft:
                image.draft("RGB", (32, 32))
            image.load()
            return image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PixelLimitError(f"The image{name} is not decoded: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise DataError(
            f"Cannot read the image{name}: it is damaged, or its format is not one of "
            f"{', '.join(FORMATS)}."
        ) from error
    except Exception as error:  # a decoder may raise anything on a broken file
        raise DataError(
            f"Cannot read the image{name}: {str(error) or type(error).__name__}."
        ) from error


def pixel_count(content: bytes) -> int:
    """Return the number of pixels in an image's header; 0 for what `open_image` refuses."""
    width, height = image_size(io.BytesIO(content)) or (0, 0)
    return width * height


def image_size(source: Any) -> tuple[int, int] | None:
    """Return the width and height of a PIL image or of a file's header; None if unreadable."""
    from PIL import Image

    if hasattr(source, "getbands"):
        return int(source.width), int(source.height)
    try:
        with Image.open(source, formats=FORMATS) as image:
            return int(image.width), int(image.height)
    except Exception:  # a decoder may raise anything on a broken file
        return None


def check_size(image: Any, most_pixels: float = math.inf, name: str = "") -> None:
    """Raise when an image has too many pixels, or is too long for its width or height."""
    size = f"{image.width} x {image.height} pixels"
    if image.width * image.height > most_pixels:
        raise PixelLimitError(
            f"The image{name} has {size}, more than {most_pixels}, and is not decoded. Make it "
            "smaller first."
        )
    if max(image.size) > MOST_ASPECT * min(image.size):
        raise DataError(
            f"The image{name} has {size}; its aspect ratio may be {MOST_ASPECT}:1 at most. Crop "
            "it first."
        )


def converted(image: Any, mode: str, *, exif_orientation: bool) -> Any:
    """Return a PIL image in a mode such as RGB, turned as its EXIF says if asked."""
    check_size(image)
    if exif_orientation and getattr(image, "format", None) != "TIFF":  # which Pillow turns itself
        from PIL import Image

        turn = None
        with suppress(Exception):  # there is none, or it is damaged: Pillow raises many kinds
            turn = TURNS[image.getexif()[0x0112]]
        image = image if turn is None else image.transpose(Image.Transpose[turn])
    try:
        return image.convert(mode)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot turn an image of mode {image.mode} to {mode}: {error}.") from error


@dataclass(frozen=True)
class ImageReader:
    """From images to the array that an exported model takes.

    Attributes:
        size: Height and width of the answer.
        crop: Share of the resized image that the centre crop keeps; None squeezes the whole image
            into the size instead.
        interpolation: `bicubic`, `bilinear`, `nearest`, ... as Pillow names them.
        mean, std: One per channel; their length (1 or 3) decides between grey and colour.
        most_pixels: Larger images are refused before they are decoded.
        exif_orientation: Turn an image upright by its EXIF orientation first.
    """

    size: tuple[int, int]
    crop: float | None
    interpolation: str
    mean: Sequence[float]
    std: Sequence[float]
    most_pixels: int = MOST_PIXELS
    exif_orientation: bool = True

    @classmethod
    def from_contract(cls, data: Mapping[str, Any]) -> ImageReader:
        """Read the preprocessing of a contract."""
        resampling(data["interpolation"])
        return cls(
            size=(data["size"][0], data["size"][1]),
            crop=data["crop"],
            interpolation=data["interpolation"],
            mean=data["mean"],
            std=data["std"],
            exif_orientation=data["exif_orientation"],
        )

    def __call__(self, items: Sequence[Any]) -> np.ndarray:
        """Turn images, paths or pixels `[H, W, 3]` (uint8) into one array `[batch, C, H, W]`."""
        return np.stack([self.array(open_image(i, most_pixels=self.most_pixels)) for i in items])

    def array(self, image: Any) -> np.ndarray:
        """Turn a PIL image into a normalised float32 array `[C, H, W]`."""
        height, width = self.size
        mode = "RGB" if len(self.mean) == 3 else "L"
        image = converted(image, mode, exif_orientation=self.exif_orientation)
        how = resampling(self.interpolation)
        if self.crop is None:
            image = image.resize((width, height), how)
        else:
            # shorter side to floor(size / crop), as timm and torchvision do
            high, wide = (math.floor(side / self.crop) for side in self.size)
            scale = max(high / image.height, wide / image.width)
            wide = max(width, int(image.width * scale + 1e-6))
            high = max(height, int(image.height * scale + 1e-6))
            left, top = round((wide - width) / 2.0), round((high - height) / 2.0)
            kept = (left, top, left + width, top + height)
            if wide * high <= WHOLE * width * height:
                image = image.resize((wide, high), how).crop(kept)
            else:
                across, down = image.width / wide, image.height / high
                box = (kept[0] * across, kept[1] * down, kept[2] * across, kept[3] * down)
                image = image.resize((width, height), how, box=box)
        pixels = np.asarray(image, dtype=np.uint8).reshape(height, width, -1).transpose(2, 0, 1)
        scaled = pixels.astype(np.float32) / np.float32(255)
        centre, spread = (
            np.asarray(values, dtype=np.float32).reshape(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return np.ascontiguousarray((scaled - centre) / spread)


@functools.cache
def resampling(name: str) -> Any:
    """Return Pillow's resampling by name; a name is checked once, not for every image."""
    from PIL import Image

    check_name("interpolation", name.lower(), [kind.name.lower() for kind in Image.Resampling])
    return Image.Resampling[name.upper()]
