"""Image transforms: from a picture to the normalised tensor that the host was trained on."""

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
    """Resize, crop the centre and normalise a picture.

    Args:
        size: height and width of the result, or one number for both.
        crop: share of the resized picture that the centre crop keeps (timm's `crop_pct`); None
            resizes the whole picture to the size instead.
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        size = self.size if isinstance(self.size, int) else list(self.size)
        mean, std = [float(v) for v in self.mean], [float(v) for v in self.std]
        return {**asdict(self), "size": size, "mean": mean, "std": std}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ImageTransform:
        """Read what `to_dict` returned; raise for impossible values.

        Without `exif_orientation`, as older folders are, images stay as they are stored.
        """
        try:
            values: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
            }
            transform = cls(**{"exif_orientation": False, **values})
            sides = (
                transform.size
                if isinstance(transform.size, tuple)
                else (transform.size, transform.size)
            )
            good = (
                len(sides) == 2
                and all(type(side) is int and 0 < side <= 2**14 for side in sides)
                and (transform.crop is None or 0 < float(transform.crop) <= 8)
                and len(transform.mean) == len(transform.std) in (1, 3)
                and all(math.isfinite(v) for v in (*transform.mean, *transform.std))
                and all(v > 0 for v in transform.std)
                and type(transform.exif_orientation) is bool
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"This is no image transform: {error}.") from error
        if not good:
            raise DataError(f"This is no image transform: {dict(data)!r:.300}.")
        resampling(transform.interpolation)
        return transform

    def __call__(self, picture: Any) -> Tensor:
        """Turn a PIL image into a tensor `[C, H, W]`."""
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        reader = ImageReader(
            size,
            self.crop,
            self.interpolation,
            self.mean,
            self.std,
            exif_orientation=self.exif_orientation,
        )
        return torch.from_numpy(reader.array(picture))


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

    def __call__(self, picture: Any) -> Tensor:
        """Turn a PIL image into a tensor `[C, H, W]`."""
        picture = converted(picture, "RGB", exif_orientation=self.exif_orientation)
        answer = self.processor(images=picture, return_tensors="pt")
        return answer["pixel_values"][0]


def image_transform(source: Any) -> Callable[[Any], Tensor]:
    """Return the transform that a host expects.

    Args:
        source: a Hugging Face image processor (or a processor that holds one), a timm model or its
            `pretrained_cfg`, an open_clip model, an `ImageTransform`, or any function from a PIL
            image to a tensor.
    """
    if isinstance(source, (ImageTransform, ProcessorTransform)):
        return source
    processor = getattr(source, "image_processor", source)
    if hasattr(processor, "image_mean") and callable(processor):
        return ProcessorTransform(processor)
    config = source if isinstance(source, Mapping) else getattr(source, "pretrained_cfg", None)
    if config is not None:
        return _from_timm(_as_dict(config), source)
    clip = getattr(getattr(source, "visual", None), "preprocess_cfg", None)
    if clip is not None:
        clip = _as_dict(clip)
        return ImageTransform(
            size=_pair(clip.get("size", 224)),
            crop=1.0 if clip.get("resize_mode", "shortest") == "shortest" else None,
            interpolation=clip.get("interpolation", "bicubic"),
            mean=tuple(clip["mean"]),
            std=tuple(clip["std"]),
        )
    if callable(source) and not isinstance(source, torch.nn.Module):
        return source
    raise DataError(
        f"Cannot tell how {type(source).__name__} wants its images. Pass the host's image "
        "processor (AutoImageProcessor.from_pretrained), an ImageTransform(size=..., mean=..., "
        "std=...), or a function from a PIL image to a tensor."
    )


def _from_timm(config: Mapping[str, Any], source: Any) -> ImageTransform:
    size = tuple(config.get("input_size", (3, 224, 224)))[1:]
    # a model built for another size keeps the published one in its cfg
    built = getattr(getattr(source, "patch_embed", None), "img_size", None)
    squash = config.get("crop_mode", "center") == "squash"
    return ImageTransform(
        size=_pair(built or size),
        crop=None if squash else config.get("crop_pct") or 0.875,
        interpolation=config.get("interpolation") or "bicubic",
        mean=tuple(config.get("mean") or IMAGENET_MEAN),
        std=tuple(config.get("std") or IMAGENET_STD),
    )


def _as_dict(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else vars(config)


def _pair(size: Any) -> int | tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else int(size)
