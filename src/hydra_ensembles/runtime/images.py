"""Images: the only opener, and resize, crop the centre, normalise. Pillow and numpy only."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
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
    if exif_orientation:
        image = _upright(image)
    try:
        return image.convert(mode)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot turn an image of mode {image.mode} to {mode}: {error}.") from error


def _upright(image: Any) -> Any:
    from PIL import Image

    if getattr(image, "format", None) == "TIFF":  # Pillow turns it; older ones keep the tag
        return image
    try:
        turn = TURNS[image.getexif()[0x0112]]
    except Exception:  # there is none, or it is damaged: Pillow raises many kinds of errors
        return image
    return image.transpose(Image.Transpose[turn])


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
        exif_orientation: Turn an image upright by its EXIF orientation first.
    """

    size: tuple[int, int]
    crop: float | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    most_pixels: int = MOST_PIXELS
    exif_orientation: bool = True

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
            exif_orientation=data.get("exif_orientation", False),  # older contracts lack it
        )

    def __call__(self, items: Sequence[Any]) -> np.ndarray:
        """Turn pictures, paths or pixels `[H, W, 3]` (uint8) into one array `[batch, C, H, W]`."""
        arrays = [
            picture_array(
                open_image(item, most_pixels=self.most_pixels),
                size=self.size,
                crop=self.crop,
                interpolation=self.interpolation,
                mean=self.mean,
                std=self.std,
                exif_orientation=self.exif_orientation,
            )
            for item in items
        ]
        return np.stack(arrays)


def picture_array(
    picture: Any,
    *,
    size: tuple[int, int],
    crop: float | None,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    exif_orientation: bool,
) -> np.ndarray:
    """Turn a PIL image into a normalised float32 array `[C, H, W]` (see `Pictures`)."""
    height, width = size
    mode = "RGB" if len(mean) == 3 else "L"
    picture = converted(picture, mode, exif_orientation=exif_orientation)
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
        left, top = round((wide - width) / 2.0), round((high - height) / 2.0)
        kept = (left, top, left + width, top + height)
        if wide * high <= WHOLE * width * height:
            picture = _resized(picture, (wide, high), how).crop(kept)
        else:
            across, down = picture.width / wide, picture.height / high
            box = (kept[0] * across, kept[1] * down, kept[2] * across, kept[3] * down)
            picture = picture.resize((width, height), how, box=box)
    pixels = np.asarray(picture, dtype=np.uint8).reshape(height, width, -1).transpose(2, 0, 1)
    scaled = pixels.astype(np.float32) / np.float32(255)
    centre, spread = (np.asarray(v, dtype=np.float32).reshape(-1, 1, 1) for v in (mean, std))
    return np.ascontiguousarray((scaled - centre) / spread)


@functools.cache
def resampling(name: str) -> Any:
    """Return Pillow's resampling by name; a name is checked once, not for every image."""
    from PIL import Image

    check_name("interpolation", name.lower(), [kind.name.lower() for kind in Image.Resampling])
    return Image.Resampling[name.upper()]


def _resized(picture: Any, size: tuple[int, int], how: Any) -> Any:
    return picture if picture.size == size else picture.resize(size, how)
