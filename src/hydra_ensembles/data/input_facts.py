"""Names and plain facts of inputs: what a person sees of them, beside the model's features.

`described` reads the texts and files behind data. `tensor_facts` reads prepared inputs: the number
of tokens that the attention mask keeps, and brightness, contrast and colour range of images.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..runtime.images import image_size
from ..uncertainty.known_ranges import NO_LETTERS, Scale
from .batches import images_of
from .loaders import Batches

LONGEST = 100
"""Characters of an example's name; of a longer text, the first ones are kept."""
HEAD = 48
"""Tokens that such an excerpt is read from, where only tokens are known."""
LETTERS = 200
"""Letters of a text that its script is found by."""


def excerpt(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text[: 8 * LONGEST].split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip() + "…"


def described(data: Any) -> dict[str, list[Any]]:
    """Return names and facts of all examples of data by column; none where they are not known.

    Data of texts keeps them (`texts`); data of images may know its `files`.
    """
    if not isinstance(data, Batches):
        return {}
    texts, files = getattr(data, "texts", None), getattr(data, "files", None)
    if isinstance(texts, list):
        return {"names": [excerpt(text) for text in texts], **text_facts(texts)}
    if isinstance(files, list):
        chosen = [files[index] for index in data.indices]
        names = [f"{file.parent.name}/{file.name}" for file in chosen]
        return {"names": names, **image_facts(chosen)}
    return {}


def text_facts(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the number of words, the share of capital letters in percent, and the script."""
    return {
        "words": [len(text.split()) for text in texts],
        "capitals": [_capitals(text) for text in texts],
        "script": [_script(text) for text in texts],
    }


def image_facts(images: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the width and height of images (paths or PIL images), before they are prepared."""
    sizes = [image_size(image) for image in images]
    if None in sizes:
        return {}
    return {"width": [s[0] for s in sizes if s], "height": [s[1] for s in sizes if s]}


def tensor_facts(inputs: Mapping[str, Any], scale: Scale | None = None) -> dict[str, Tensor]:
    """Return facts of prepared inputs by column, each `[example]`.

    Brightness is the mean of all pixels, contrast the standard deviation of the channels' mean, and
    the colour range the mean distance between the largest and the smallest channel.

    Args:
        inputs: Inputs of the host by name.
        scale: Mean and standard deviation per channel, by which images were normalised.
    """
    found: dict[str, Tensor] = {}
    mask, pixels = inputs.get("attention_mask"), images_of(inputs)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        found["tokens"] = mask.detach().cpu().bool().sum(1)
    if pixels is not None:
        pixels = pixels.detach().float()
        if scale is not None and len(scale[0]) in (1, pixels.shape[1]):
            mean, deviation = (pixels.new_tensor(values).view(-1, 1, 1) for values in scale)
            pixels = pixels * deviation + mean
        found["brightness"] = pixels.flatten(1).mean(1).cpu()
        found["contrast"] = pixels.mean(1).flatten(1).std(1, correction=0).cpu()
        if pixels.shape[1] == 3:
            found["colour"] = (pixels.amax(1) - pixels.amin(1)).flatten(1).mean(1).cpu()
    return found


def token_heads(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tokens of each text, int64 `[example, HEAD]`, filled with -1; or None."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape == mask.shape):
        return None
    heads = torch.full((len(ids), HEAD), -1)
    for row, (tokens, kept) in enumerate(zip(ids.cpu(), mask.cpu().bool(), strict=True)):
        first = tokens[kept][:HEAD]
        heads[row, : len(first)] = first
    return heads


def decoded(heads: Tensor, tokenizer: Any) -> list[str]:
    """Return excerpts of texts of which the first tokens are known."""
    rows = [[token for token in row if token >= 0] for row in heads.tolist()]
    return [excerpt(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def image_scale(transform: Any) -> Scale | None:
    """Return what a transform normalises images by, or None if that is not known."""
    mean, deviation = getattr(transform, "mean", None), getattr(transform, "std", None)
    if mean is None or deviation is None:
        return None
    both = [
        tuple(torch.as_tensor(values).float().reshape(-1).tolist()) for values in (mean, deviation)
    ]
    return (both[0], both[1]) if len(both[0]) == len(both[1]) else None


def _capitals(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return 100 * sum(map(str.isupper, letters)) / max(1, len(letters))


def _script(text: str) -> str:
    letters = islice(filter(str.isalpha, text), LETTERS)
    counts = Counter(map(_script_of_letter, letters)).most_common(1)
    return counts[0][0] if counts else NO_LETTERS


@functools.lru_cache(maxsize=4096)
def _script_of_letter(letter: str) -> str:
    name = unicodedata.name(letter, "unknown").split()[0]
    return name if name == "CJK" else name.capitalize()
