"""The preprocessing of an exported ensemble: checked against the original before it is written.

The runtime has its own code for images and texts, without torch and transformers. Its arrays must
equal those of the ensemble's own transform or tokenizer, or preprocessing is left out with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..data.transforms import ImageTransform, ProcessorTransform
from ..errors import HydraError
from ..fusion import HydraEnsemble
from ..fusion.inputs import prepare
from ..hosts.prompt_classifier import PromptClassifier
from ..runtime.images import ImageReader
from ..runtime.texts import PARTS, Texts
from .export_example import Example

TOKENIZER = "tokenizer.json"
TRIALS = ("a joy to watch", "", "Ünïcode – 汉字 🙂 and\ttabs\n", "word " * 5000)
"""Texts that the exported tokenizer must split as the original does."""
ASKED = ("who saw it?", "", "Ünïcode – 汉字 🙂?", "where")
"""Questions about them."""

PIXEL_TOLERANCE = 0.06
"""In normalised pixels: an image processor that resizes by torch rounds a little differently."""


def image_preparation(transform: Any) -> dict[str, Any] | None:
    """Return the preprocessing of images as plain data; None, with a warning, when it has none."""
    if transform is None:
        return None
    made = transform if isinstance(transform, ImageTransform) else None
    if isinstance(transform, ProcessorTransform):
        made = _from_processor(transform)
    problem = "it is a function of its own" if made is None else _image_difference(made, transform)
    if made is None or problem:
        warnings.warn(
            f"The image transform {type(transform).__name__} cannot be exported ({problem}), so "
            "the exported ensemble takes prepared arrays only. To include it, set "
            "ensemble.transform to an ImageTransform.",
            stacklevel=4,
        )
        return None
    data = made.to_dict()
    size = data["size"]
    return {"kind": "image", **data, "size": [size, size] if isinstance(size, int) else size}


def _from_processor(transform: ProcessorTransform) -> ImageTransform | None:
    """Read the settings of a Hugging Face image processor, where they are the usual ones."""
    from PIL import Image

    def setting(name: str, default: Any = None) -> Any:
        return getattr(transform.processor, name, default)

    def sides(size: Any, *names: str) -> tuple[Any, ...]:
        get = size.get if isinstance(size, dict) else lambda name: getattr(size, name, None)
        return tuple(get(name) for name in names)

    size = setting("size")
    to_unit = abs(setting("rescale_factor", 1 / 255) * 255 - 1) < 1e-6
    if not (setting("do_rescale", True) and to_unit and setting("do_resize", True) and size):
        return None
    exact, (shortest,) = sides(size, "height", "width"), sides(size, "shortest_edge")
    crops = bool(setting("do_center_crop", False))
    target = sides(setting("crop_size"), "height", "width") if crops else exact
    if None in target or (crops and shortest is None and exact != target):
        return None
    normalises = bool(setting("do_normalize", True))
    try:
        return ImageTransform(
            size=(int(target[0]), int(target[1])),
            crop=min(target) / shortest if crops and shortest else None,
            interpolation=Image.Resampling(int(setting("resample", 3))).name.lower(),
            mean=tuple(setting("image_mean")) if normalises else (0.0, 0.0, 0.0),
            std=tuple(setting("image_std")) if normalises else (1.0, 1.0, 1.0),
            exif_orientation=transform.exif_orientation,
        )
    except (TypeError, ValueError):
        return None


def _image_difference(made: ImageTransform, transform: Any) -> str | None:
    """Say by how much the runtime and a transform differ on one image, or None if they agree."""
    from PIL import Image

    rows, columns = np.mgrid[0:300, 0:400]
    waves = [np.sin(rows / 23.0), np.cos(columns / 31.0), np.sin((rows + columns) / 47.0)]
    image = Image.fromarray((127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8))
    size = made.size if isinstance(made.size, tuple) else (made.size, made.size)
    reader = ImageReader(size, made.crop, made.interpolation, made.mean, made.std)
    ours, theirs = reader.array(image), transform(image).numpy()
    if ours.shape != theirs.shape:
        return f"it makes {list(theirs.shape)}, not {list(ours.shape)}"
    apart = float(np.abs(ours - theirs).max())
    return f"ours differs from it by {apart:.3g}" if apart > PIXEL_TOLERANCE else None


def text_preparation(
    ensemble: HydraEnsemble, inputs: Example, folder: Path
) -> dict[str, Any] | None:
    """Write a tokenizer's files into a folder; return its settings, or None when it has none.

    Only tokenizers with a `tokenizer.json` run without transformers.
    """
    host, tokenizer = ensemble.host, ensemble.tokenizer
    if tokenizer is None:
        return None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        problem: str | None = "it has no tokenizer.json"
    elif unknown := inputs.tensors.keys() - PARTS.keys() - {"sequence_ids"}:
        problem = f"it does not make {', '.join(sorted(unknown))}"
    else:
        tokenizer.save_pretrained(str(folder))
        prompt = host if isinstance(host, PromptClassifier) else None
        settings = {
            "kind": "text",
            "file": TOKENIZER,
            "max_length": inputs.most_tokens,
            "pad_id": int(tokenizer.pad_token_id or 0),
            "pad_token": str(tokenizer.pad_token or ""),
            "padding_side": "right" if prompt else tokenizer.padding_side,
            "truncation_side": tokenizer.truncation_side,
            "template": prompt.template if prompt else None,
            "reads": reads_of(ensemble),
        }
        trials: list[Any] = list(TRIALS)
        if settings["reads"] == "question":
            asked = zip(ASKED, TRIALS, strict=True)
            trials = [{"question": question, "context": text} for question, text in asked]
        theirs = prompt.encode(trials) if prompt else prepare(ensemble, trials)
        content = (folder / TOKENIZER).read_text(encoding="utf-8")
        problem = _text_difference(content, settings, trials, list(inputs.tensors), theirs)
        if problem is None:
            return settings
    warnings.warn(
        f"The tokenizer {type(tokenizer).__name__} cannot be exported ({problem}), so the exported "
        "ensemble takes prepared arrays only.",
        stacklevel=4,
    )
    return None


def reads_of(ensemble: HydraEnsemble) -> str:
    """Return what an ensemble makes of texts: one of `READS` of the contract."""
    if "answer" in ensemble.task.prediction.FIELDS:
        return "question"
    return "tokens" if ensemble.task.by_token else "text"


def _text_difference(
    content: str,
    settings: dict[str, Any],
    trials: Sequence[Any],
    inputs: Sequence[str],
    theirs: Mapping[str, Any],
) -> str | None:
    """Say how the runtime's tokens differ from the tokenizer's, or None if they agree."""
    try:
        ours = Texts(content, settings, inputs)(trials)
    except HydraError as error:
        return str(error)
    arrays = {n: tensor.cpu().numpy() for n, tensor in theirs.items() if isinstance(tensor, Tensor)}
    mask = arrays.get("attention_mask")
    for name in inputs:
        same = name in arrays and ours[name].shape == arrays[name].shape
        differs = ours[name] != arrays[name] if same else True
        if name == "input_ids" and mask is not None and same:
            differs = differs & (mask == 1)  # ids under a zero mask do not matter
        if np.any(differs):
            return f"ours splits some texts differently ({name})"
    return None
