"""OOD proxies: outliers made from in-distribution data, for searches that have no real ones.

A proxy represents one family of outliers at best, so use several: a search fits the family it sees.
Every proxy is re-iterable, the same in every pass and for every batch size, and has no labels.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ..batches import Batch, batch_length, describe, images_of, with_images, without_labels
from ..corruptions.base import Draws, Normalisation, draw_seeds
from ..loaders import Data, Mapped, check_reiterable
from ..splits import fingerprint
from . import tokens
from .base import Proxy as Proxy
from .base import proxies as proxies
from .base import spread
from .images import ImageContext as ImageContext
from .tokens import TokenContext as TokenContext

IMAGE_BANK, TEXT_BANK = 64, 512


def make_proxies(
    data: Data,
    kinds: str | Sequence[str] = "auto",
    *,
    seed: int = 0,
    mean: Any = None,
    std: Any = None,
    tokenizer: Any = None,
) -> dict[str, Data]:
    """Make outliers from in-distribution data; return one data set per kind.

        ensemble = hydra.build(model, data, ood=make_proxies(data, ["shuffle", "mix"]))

    Args:
        data: batches of images, or of token ids (`input_ids`, `attention_mask`).
        kinds: names of registered proxies, or `auto`: all that fit. For images `corrupt`,
            `shuffle`, `mix`, `blur`, `tile`, `sketch`, `noise`; for text `shuffle_words`,
            `token_noise`, `foreign`, `halves`.
        seed: seed of every draw.
        mean, std: normalisation of the images; by default that of the data's transform, or guessed
            from the pixel range.
        tokenizer: identifies special and foreign tokens; by default the data's own. Without one,
            ids that begin or end every sentence are special, and ids that do not occur are foreign.
    """
    first = next(iter(check_reiterable(data)), None)
    if first is None:
        raise DataError("The data is empty, so there is nothing to make proxies of.")
    if images_of(first) is not None:
        modality = "image"
    elif isinstance(first, Mapping) and "input_ids" in first:
        modality = "text"
    else:
        raise DataError(
            "Proxies are made of images [B, C, H, W] or of token ids under 'input_ids'; "
            f"{describe(first)}. Pass outliers of your own instead."
        )
    if kinds == "auto":
        names = [name for name in proxies if proxies[name].modality == modality]
    else:
        names = [kinds] if isinstance(kinds, str) else list(kinds)
    for name in names:
        if proxies[name].modality != modality:
            fitting = ", ".join(n for n in proxies if proxies[n].modality == modality)
            raise DataError(
                f"The proxy {name!r} is made of {proxies[name].modality}s, but the data holds "
                f"{modality}s. Those that fit: {fitting}."
            )
    tokenizer = getattr(data, "tokenizer", None) if tokenizer is None else tokenizer
    normalisation = Normalisation.of(data, mean, std)
    context = Context(
        data, seed=seed, mean=normalisation.mean, std=normalisation.std, tokenizer=tokenizer
    )
    # a seed by name, so that a kind does not depend on the other kinds
    return {
        name: ProxyData(data, proxies[name], context, zlib.crc32(f"{seed} {name}".encode()))
        for name in names
    }


class Context:
    """What the proxies of one data set share; computed when first needed."""

    def __init__(self, data: Data, *, seed: int, mean: Any, std: Any, tokenizer: Any) -> None:
        self.data, self.seed, self.tokenizer = data, seed, tokenizer
        self.mean, self.std = mean, std

    @cached_property
    def images(self) -> ImageContext:
        """A bank of images and their normalisation."""
        bank = images_of(spread(self.data, IMAGE_BANK, self.seed))
        assert bank is not None
        return ImageContext.of(bank.cpu(), self.mean, self.std)

    @cached_property
    def tokens(self) -> TokenContext:
        """A bank of sentences and the ids' roles."""
        return TokenContext.of(spread(self.data, TEXT_BANK, self.seed), self.tokenizer)


class ProxyData(Mapped):
    """Data of one proxy, made batch by batch."""

    def __init__(self, data: Data, proxy: Proxy, context: Context, seed: int) -> None:
        def start() -> Callable[[Batch], Batch]:
            generator = torch.Generator().manual_seed(seed)
            return lambda batch: apply_proxy(
                proxy,
                without_labels(batch),
                draw_seeds(batch_length(batch), generator),
                context,
            )

        super().__init__(data, start)
        self._proxy, self._context, self._seed = proxy, context, seed

    def fingerprint(self) -> str:
        """Return a hash of the data, of everything else the draws read, and of the first batch.

        Making every example would take as long as a pass over the data. Instead, everything that
        could change an example (seed, bank of partners, roles of ids) is hashed.
        """
        context = self._context.tokens if self._proxy.modality == "text" else self._context.images
        total = hashlib.sha256(f"{self._proxy.make.__name__} {self._seed}\n".encode())
        for value in vars(context).values():
            total.update(fingerprint([value]).encode())
        total.update(fingerprint(self.data).encode())
        total.update(fingerprint([next(iter(self))]).encode())
        return total.hexdigest()


def apply_proxy(proxy: Proxy, batch: Batch, seeds: Tensor, context: Context) -> Batch:
    """Make one proxy per example of a batch, each from its own seed `[batch]`."""
    if proxy.modality == "text":
        return tokens.apply(proxy.make, batch, seeds, context.tokens)
    images = images_of(batch)
    if images is None:
        raise DataError(f"Expected a batch of images; {describe(batch)}.")
    draws = Draws(seeds, images.device)
    pixels = proxy.make(context.images.to_pixels(images), draws, context.images)
    return with_images(batch, context.images.from_pixels(pixels, images))
