"""The preprocessing of an exported ensemble: checked against the original before it is written.

The runtime has its own code for pictures and texts, without torch and transformers. What it makes
must be what the ensemble's own transform or tokenizer makes, or it is left out with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.transforms import ImageTransform, ProcessorTransform
from ..errors import HydraError
from ..fusion import HydraEnsemble
from ..hosts.prompt_classifier import PromptClassifier
from ..runtime.images import Pictures
from ..runtime.texts import PARTS, Texts
from .export_example import most_tokens

TOKENIZER = "tokenizer.json"
TRIALS = ("a joy to watch", "", "Ünïcode – 汉字 🙂 and\ttabs\n", "word " * 5000)
"""Texts that the exported tokenizer must split as the original does."""

PIXEL_TOLERANCE = 0.06
"""Of normalised pixels: an image processor that resizes by torch rounds a little differently."""


def image_preparation(transform: Any) -> dict[str, Any] | None:
    """Return the preprocessing of pictures as plain data, or None when it cannot be told."""
    if transform is None:
        return None
    made = transform if isinstance(transform, ImageTransform) else None
    if isinstance(transform, ProcessorTransform):
        made = _from_processor(transform)
    problem = "it is a function of its own" if made is None else _difference(made, transform)
    if made is None or problem:
        warnings.warn(
            f"The image transform {type(transform).__name__} cannot be exported ({problem}): the "
            "exported ensemble takes prepared arrays only. Set ensemble.transform to an "
            "ImageTransform to have it inside.",
            stacklevel=4,
        )
        return None
    data = made.to_dict()
    size = data["size"]
    return {"kind": "image", **data, "size": [size, size] if isinstance(size, int) else size}


def _from_processor(transform: ProcessorTransform) -> ImageTransform | None:
    """Read the settings of a Hugging Face image processor, where they are the usual ones."""
    processor = transform.processor

    def says(name: str, default: Any = None) -> Any:
        return getattr(processor, name, default)

    def side(size: Any, *names: str) -> Any:
        return None if size is None else tuple(_get(size, name) for name in names)

    size, crop_size = says("size"), says("crop_size")
    plain = says("do_rescale", True) and abs(says("rescale_factor", 1 / 255) * 255 - 1) < 1e-6
    if not plain or not says("do_resize", True) or size is None:
        return None
    exact, shortest = side(size, "height", "width"), _get(size, "shortest_edge")
    crops = bool(says("do_center_crop", False))
    target = side(crop_size, "height", "width") if crops else exact
    if target is None or None in target:
        return None
    if crops and shortest is None and exact != target:
        return None
    crop = min(target) / shortest if crops and shortest else None
    normal = bool(says("do_normalize", True))
    resample = says("resample", 3)
    from PIL import Image

    try:
        return ImageTransform(
            size=(int(target[0]), int(target[1])),
            crop=crop,
            interpolation=Image.Resampling(int(resample)).name.lower(),
            mean=tuple(says("image_mean")) if normal else (0.0, 0.0, 0.0),
            std=tuple(says("image_std")) if normal else (1.0, 1.0, 1.0),
            exif_orientation=transform.exif_orientation,
        )
    except (TypeError, ValueError):
        return None


def _get(size: Any, name: str) -> Any:
    return size.get(name) if isinstance(size, dict) else getattr(size, name, None)


def _difference(made: ImageTransform, transform: Any) -> str | None:
    """Say by how much two transforms of one picture differ, or None when they agree."""
    from PIL import Image

    rows, columns = np.mgrid[0:300, 0:400]
    waves = [np.sin(rows / 23.0), np.cos(columns / 31.0), np.sin((rows + columns) / 47.0)]
    pixels = (127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    size = made.size if isinstance(made.size, tuple) else (made.size, made.size)
    pictures = Pictures(size, made.crop, made.interpolation, tuple(made.mean), tuple(made.std))
    ours, theirs = pictures([picture])[0], transform(picture).numpy()
    if ours.shape != theirs.shape:
        return f"it makes {list(theirs.shape)}, not {list(ours.shape)}"
    apart = float(np.abs(ours - theirs).max())
    return f"ours differs from it by {apart:.3g}" if apart > PIXEL_TOLERANCE else None


def text_preparation(
    ensemble: HydraEnsemble, inputs: Sequence[str], folder: Path
) -> dict[str, Any] | None:
    """Write a tokenizer's files into a folder; return its settings, or None when it has none.

    Only tokenizers with a `tokenizer.json` run without transformers.
    """
    prompts = isinstance(ensemble.host, PromptClassifier)
    tokenizer = ensemble.tokenizer
    if tokenizer is None:
        return None
    problem = None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        problem = "it has no tokenizer.json"
    elif not set(inputs) <= set(PARTS):
        problem = f"it does not make {', '.join(sorted(set(inputs) - set(PARTS)))}"
    if problem is None:
        tokenizer.save_pretrained(str(folder))
        settings = {
            "kind": "text",
            "file": TOKENIZER,
            "max_length": most_tokens(ensemble),
            "pad_id": int(tokenizer.pad_token_id or 0),
            "pad_token": str(tokenizer.pad_token or ""),
            "padding_side": "right" if prompts else tokenizer.padding_side,
            "truncation_side": tokenizer.truncation_side,
            "template": ensemble.host.template if prompts else None,
        }
        problem = _text_difference(ensemble, settings, inputs, folder)
        if problem is None:
            return settings
    warnings.warn(
        f"The tokenizer {type(tokenizer).__name__} cannot be exported ({problem}): the exported "
        "ensemble takes prepared arrays only.",
        stacklevel=4,
    )
    return None


def _text_difference(
    ensemble: HydraEnsemble, settings: dict[str, Any], inputs: Sequence[str], folder: Path
) -> str | None:
    from ..fusion.inputs import prepare

    content = (folder / TOKENIZER).read_text(encoding="utf-8")
    json.loads(content)
    host: Any = ensemble.host
    try:
        ours = Texts(content, settings, inputs)(TRIALS)
    except HydraError as error:
        return str(error)
    if isinstance(host, PromptClassifier):
        theirs = host.encode(list(TRIALS))
    else:
        theirs = prepare(ensemble, list(TRIALS))
    for name in inputs:
        if name not in theirs or not np.array_equal(ours[name], theirs[name].cpu().numpy()):
            mask = theirs.get("attention_mask")
            # padding ids mean nothing where the mask is zero
            if name == "input_ids" and mask is not None and ours[name].shape == mask.shape:
                real = mask.cpu().numpy() == 1
                if np.array_equal(ours[name][real], theirs[name].cpu().numpy()[real]):
                    continue
            return f"ours splits some texts differently ({name})"
    return None
