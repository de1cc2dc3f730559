"""Single examples for a page: an image or a text, and what the model said about it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, FormatError


@dataclass(frozen=True)
class Example:
    """One example as shown to readers.

    Attributes:
        group: Its heading, such as `most certain`.
        predicted: What the model said: a class, labels, or numbers.
        confidence: Its probability; None where the answer has none.
        uncertainty: The score.
        label: The true class; empty for out-of-distribution examples.
        source: Where it comes from: a file, or a set and a number.
        image: A `data:` address of a PNG, or empty.
        text: The text itself, or empty.
        note: One more line, or empty.
        wrong: Whether it is wrong; None: where the label is another word than what was said.
    """

    group: str
    predicted: str
    confidence: float | None
    uncertainty: float
    label: str = ""
    source: str = ""
    image: str = ""
    text: str = ""
    note: str = ""
    wrong: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Example:
        """Read what `to_dict` returned."""
        try:
            example = cls(**data)
        except TypeError as error:
            raise FormatError(f"Not an example of a report: {error}.") from error
        if example.image and not example.image.startswith("data:image/"):
            raise FormatError("A report embeds its images: expected an address of data:image/.")
        return example


def image_address(image: Tensor, *, mean: Any = 0.5, std: Any = 0.5, largest: int = 160) -> str:
    """Return an image tensor `[C, H, W]` (1 or 3 channels) as a `data:` address of a PNG.

    Args:
        image: As the host takes it, normalised.
        mean, std: What it was normalised with, a number or one per channel; None if it was not.
        largest: The longer side in pixels, at most; larger images are reduced.
    """
    from PIL import Image

    pixels = image.detach().float().cpu()
    if mean is not None and std is not None:
        shift, scale = (torch.as_tensor(v).float().reshape(-1, 1, 1) for v in (mean, std))
        pixels = pixels * scale + shift
    factor = largest / max(pixels.shape[1:])
    if factor < 1:
        pixels = torch.nn.functional.interpolate(
            pixels[None], scale_factor=factor, mode="area", recompute_scale_factor=True
        )[0]
    numbers = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    if numbers.shape[-1] not in (1, 3):
        raise DataError(f"An image has {numbers.shape[-1]} channels; expected 1 or 3.")
    content = io.BytesIO()
    Image.fromarray(numbers.squeeze(-1).numpy()).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
