"""Image transforms: from an image to the normalised tensor that the host was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..runtime.images import ImageReader, converted, resampling

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
PROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop the centre and normalise an image; impossible values raise when it is made.

        transform = ImageTransform(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

    Args:
        size: height and width of the result, or one number for both.
        crop: share of the resized image that the centre crop keeps (timm's `crop_pct`); None
            resizes the whole image to the size instead.
        interpolation: `bicubic`, `bilinear`, `nearest` or `lanczos`.
        mean, std: one per channel; their length (1 or 3) decides between grey and colour.
        exif_orientation: turn the image upright by its EXIF orientation first, as viewers do.
    """

    size: int | tuple[int, int] = 224
    crop: float | None = 1.0
    interpolation: str = "bicubic"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    exif_orientation: bool = True

    def __post_init__(self) -> None:
        sides = self._sides
        try:
            good = (
                len(sides) == 2
                and all(type(side) is int and 0 < side <= 2**14 for side in sides)
                and (self.crop is None or 0 < float(self.crop) <= 8)
                and len(self.mean) == len(self.std) in (1, 3)
                and all(math.isfinite(v) for v in (*self.mean, *self.std))
                and all(v > 0 for v in self.std)
                and type(self.exif_orientation) is bool
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"Not a valid image transform: {error}.") from error
        if not good:
            raise DataError(f"Not a valid image transform: {self!r:.300}.")
        resampling(self.interpolation)

    @property
    def _sides(self) -> tuple[int, int]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        mean, std = [float(v) for v in self.mean], [float(v) for v in self.std]
        return {**asdict(self), "size": size, "mean": mean, "std": std}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ImageTransform:
        """Read what `to_dict` returned; raise for impossible values.

        Without `exif_orientation`, as older folders are, images stay as they are stored.
        """
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        try:
            return cls(**{"exif_orientation": False, **values})
        except (TypeError, AttributeError) as error:
            raise DataError(f"Not a valid image transform: {error}.") from error

    def __call__(self, image: Any) -> Tensor:
        """Turn a PIL image into a tensor `[C, H, W]`."""
        reader = ImageReader(
            self._sides,
            self.crop,
            self.interpolation,
            self.mean,
            self.std,
            exif_orientation=self.exif_orientation,
        )
        return torch.from_numpy(reader.array(image))


@dataclass(frozen=True)
class ProcessorTransform:
    """Run a Hugging Face image processor, which knows its own size and normalisation.

    Attributes:
        processor: The image processor. It does not read EXIF.
        exif_orientation: Turn the image upright by its EXIF orientation first.
    """

    processor: Any
    exif_orientation: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return what is recorded beside the processor's own file."""
        return {"processor": PROCESSOR_FILE, "exif_orientation": self.exif_orientation}

    @property
    def mean(self) -> Sequence[float] | None:
        """What the processor subtracts, or None when it does not normalise."""
        return self.processor.image_mean if getattr(self.processor, "do_normalize", True) else None

    @property
    def std(self) -> Sequence[float] | None:
        """What the processor divides by, or None when it does not normalise."""
        return self.processor.image_std if getattr(self.processor, "do_normalize", True) else None

    def __call__(self, image: Any) -> Tensor:
        """Turn a PIL image into a tensor `[C, H, W]`."""
        image = converted(image, "RGB", exif_orientation=self.exif_orientation)
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def image_transform(source: Any) -> Callable[[Any], Tensor]:
    """Return the transform that a host expects.

        transform = image_transform(AutoImageProcessor.from_pretrained(name))

    Args:
        source: a Hugging Face image processor (or a processor that holds one), a timm model or its
            `pretrained_cfg`, an open_clip model, an `ImageTransform`, or any function from a PIL
            image to a tensor.
    """
    if isinstance(source, (ImageTransform, ProcessorTransform)):
        return source
    function: Callable[[Any], Tensor] = source
    processor = getattr(source, "image_processor", source)
    if hasattr(processor, "image_mean") and callable(processor):
        return ProcessorTransform(processor)
    timm = source if isinstance(source, Mapping) else getattr(source, "pretrained_cfg", None)
    clip = getattr(getattr(source, "visual", None), "preprocess_cfg", None)
    if timm is not None:
        config = timm if isinstance(timm, Mapping) else vars(timm)
        size = tuple(config.get("input_size", (3, 224, 224)))[1:]
        # a model built for another size keeps the published one in its cfg
        size = getattr(getattr(source, "patch_embed", None), "img_size", None) or size
        whole = config.get("crop_mode", "center") == "squash"
        crop = config.get("crop_pct") or 0.875
    elif clip is not None:
        config = clip if isinstance(clip, Mapping) else vars(clip)
        size, crop = config.get("size", 224), 1.0
        whole = config.get("resize_mode", "shortest") != "shortest"
    elif callable(source) and not isinstance(source, torch.nn.Module):
        return function
    else:
        raise DataError(
            f"Cannot tell how {type(source).__name__} wants its images. Pass the host's image "
            "processor (AutoImageProcessor.from_pretrained), an ImageTransform(size=..., mean=..., "
            "std=...), or a function from a PIL image to a tensor."
        )
    return ImageTransform(
        size=(int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else int(size),
        crop=None if whole else crop,
        interpolation=config.get("interpolation") or "bicubic",
        mean=tuple(config.get("mean") or IMAGENET_MEAN),
        std=tuple(config.get("std") or IMAGENET_STD),
    )
