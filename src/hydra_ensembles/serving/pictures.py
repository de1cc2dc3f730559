"""Open a picture that a stranger sent: its size is read before its pixels are."""

from __future__ import annotations

import io
from typing import Any

from .limits import Limits, Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Decoders that may see foreign bytes; Pillow has more, some of which start other programs."""

BROKEN = "This is no picture that can be read; expected " + ", ".join(FORMATS) + "."


class Pictures:
    """Open the pictures of one request, which share one limit of pixels."""

    def __init__(self, limits: Limits) -> None:
        self._limit = self._left = limits.pixels

    def open(self, content: bytes) -> Any:
        """Return a decoded PIL image; refuse what is too large or broken."""
        from PIL import Image

        if not content:
            raise Refusal(422, "The picture is empty.")
        try:
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            self._left -= picture.width * picture.height
            if self._left < 0:
                raise self._too_large()
            picture.load()
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise self._too_large() from None
        except Refusal:
            raise
        except Exception:  # whatever foreign bytes do to a decoder
            raise Refusal(422, BROKEN) from None
        return picture

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"The pictures of this request have more than {self._limit} pixels. Make them smaller "
            "or send fewer.",
        )
