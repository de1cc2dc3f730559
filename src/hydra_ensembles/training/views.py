"""Views of data: lightly changed examples, and variants whose label is destroyed.

Every view is a pure function of a seed, the example's number and the view's number. A teacher's
answer to it can therefore be computed once and saved, and a resumed run sees the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import Data, describe, images_of, join, take, without_labels
from ..data.corruptions.base import Draws
from ..data.proxies import Context, ImageContext, Proxy, TokenContext, apply_proxy, proxies
from ..errors import DataError
from .stream import derive_seed

IMAGE_KINDS = ("shuffle", "mix", "noise", "tile")
TEXT_KINDS = ("shuffle_words", "token_noise", "halves")


def _light_images(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Shift by up to 1/16 of the side, change contrast by up to 10 % and add 2 % noise."""
    height, width = pixels.shape[-2:]
    reach = max(1, round(min(height, width) / 16))
    padded = F.pad(pixels, (reach,) * 4, mode="replicate")
    moves = draws.integers(2, low=0, high=2 * reach + 1).tolist()
    moved = torch.stack(
        [
            image[:, down : down + height, across : across + width]
            for image, (down, across) in zip(padded, moves, strict=True)
        ]
    )
    contrast = draws.uniform(1, 1, 1, low=0.9, high=1.1)
    mean = moved.mean((1, 2, 3), keepdim=True)
    noise = 0.02 * draws.normal(*pixels.shape[1:])
    return mean + contrast * (moved - mean) + noise


def _light_tokens(content: Tensor, generator: torch.Generator, context: TokenContext) -> Tensor:
    """Replace up to 10 % of the tokens by random tokens from the data."""
    rate = 0.1 * float(torch.rand((), generator=generator))
    other = context.seen[torch.randint(len(context.seen), content.shape, generator=generator)]
    return torch.where(torch.rand(content.shape, generator=generator) < rate, other, content)


def _invert(pixels: Tensor, draws: Draws, context: ImageContext) -> Tensor:
    """Invert the pixels; of every second image on average, also shuffle the patches."""
    shuffled = proxies["shuffle"].make(pixels, draws, context)
    both = draws.integers(1, 1, 1, low=0, high=2).bool()
    return 1 - torch.where(both, shuffled, pixels)


LIGHT = {"image": Proxy("image", _light_images), "text": Proxy("text", _light_tokens)}


class Views:
    """Makes views of numbered examples.

    Args:
        data: The examples; some of them are mixed into others.
        seed: Determines every draw.
        kinds: Names of label-destroying proxies, and `"invert"` for images. By default: shuffled
            patches, mixtures, noise, tiled crops and inverted images; or shuffled words, replaced
            tokens and halves of two sentences.
        augment: Whether light views are changed at all.
    """

    def __init__(
        self, data: Data, *, seed: int, kinds: tuple[str, ...] | None = None, augment: bool = True
    ) -> None:
        first = next(iter(data))
        if images_of(first) is not None:
            self.modality = "image"
        elif isinstance(first, Mapping) and "input_ids" in first:
            self.modality = "text"
        else:
            raise DataError(
                "Views are made of images [B, C, H, W] or of token ids under 'input_ids'; "
                f"{describe(first)}. Pass augment=False and outliers=None, or outliers of your own."
            )
        self.seed, self.augment = seed, augment
        default = (*IMAGE_KINDS, "invert") if self.modality == "image" else TEXT_KINDS
        self.kinds = kinds or default
        self._proxies = [
            Proxy("image", _invert) if k == "invert" else proxies[k] for k in self.kinds
        ]
        transform = getattr(data, "transform", None)
        self._context = Context(
            data,
            seed=seed,
            mean=getattr(transform, "mean", None),
            std=getattr(transform, "std", None),
            tokenizer=getattr(data, "tokenizer", None),
        )

    def light(self, batch: Any, samples: Tensor, view: int) -> Any:
        """Return a lightly augmented batch; view 0 is the batch itself."""
        if view == 0 or not self.augment:
            return batch
        seeds = self._seeds("light", samples, view)
        return apply_proxy(LIGHT[self.modality], batch, seeds, self._context)

    def destroyed(self, batch: Any, samples: Tensor, view: int) -> Any:
        """Return a batch of label-destroying variants, one kind per example, chosen by its seed."""
        batch = without_labels(batch)
        seeds = self._seeds("destroyed", samples, view)
        kinds = seeds % len(self._proxies)
        order, variants = [], []
        for kind in kinds.unique().tolist():
            rows = (kinds == kind).nonzero().flatten()
            part = take(batch, rows.tolist())
            variants.append(apply_proxy(self._proxies[kind], part, seeds[rows], self._context))
            order.append(rows)
        return take(join(variants), torch.cat(order).argsort().tolist())

    def _seeds(self, name: str, samples: Tensor, view: int) -> Tensor:
        numbers = [derive_seed(name, self.seed, view, i) >> 1 for i in samples.tolist()]
        return torch.tensor(numbers, dtype=torch.long)
