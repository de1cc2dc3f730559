"""What proxies share: the registry, and a bank of examples from all over the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import DataError
from ...registry import Registry
from ..batches import Batch, batch_length, join, take
from ..corruptions.base import draw_seeds
from ..loaders import Batches, Data


@dataclass(frozen=True)
class Proxy:
    """A kind of outlier made from in-distribution examples.

    Args:
        modality: `image` or `text`.
        make: for images `(pixels [B, C, H, W] in [0, 1], Draws, ImageContext) -> pixels`; for text
            `(content ids [n] of one sentence, torch.Generator, TokenContext) -> ids [n]`.
    """

    modality: str
    make: Callable[..., Tensor]


proxies: Registry[Proxy] = Registry("proxy")
Make = TypeVar("Make", bound=Callable[..., Tensor])


def _register(modality: str, name: str) -> Callable[[Make], Make]:
    """Register a proxy of images or of token ids under `name`."""

    def add(make: Make) -> Make:
        proxies.register(name)(Proxy(modality, make))
        return make

    return add


image_proxy, text_proxy = partial(_register, "image"), partial(_register, "text")


def spread(data: Data, count: int, seed: int) -> Batch:
    """Draw `count` examples from all over the data as one batch, the same for any batch size."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(data, Batches):
        keys = draw_seeds(data.count, generator)
        rows = keys.argsort()[:count].sort().values.tolist()
        return next(iter(data.subset(rows, batch_size=max(1, len(rows)))))
    kept: list[tuple[int, int, Batch]] = []  # key, place, example: those of the smallest keys
    place = 0
    for batch in data:
        keys = draw_seeds(batch_length(batch), generator)
        limit = kept[-1][0] if len(kept) == count else 2**62
        for row in (keys < limit).nonzero().flatten().tolist():
            kept.append((int(keys[row]), place + row, take(batch, [row])))
        kept = sorted(kept, key=lambda entry: entry[0])[:count]
        place += len(keys)
    if not kept:
        raise DataError("The data is empty, so there is nothing to make proxies of.")
    return join([example for _, _, example in sorted(kept, key=lambda entry: entry[1])])
