"""What members are taught on: views of the data, and label-destroying variants of it.

Views of data: lightly changed examples, and variants whose label is destroyed.

Every view is a pure function of a seed, the example's number and the view's number. A teacher's
answer to it can therefore be computed once and saved, and a resumed run sees the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import columns, describe, images_of, join, take, without_labels
from ..data.corruptions.base import Draws
from ..data.loaders import Batches, Data, as_data
from ..data.proxies import Context, ImageContext, Proxy, TokenContext, apply_proxy, proxies
from ..errors import DataError
from .outlier_exposure import FIRST_NUMBER, Cycle
from .sample_order import Stream, _pool, derive_seed, numbered
from .settings import Settings
from .teacher_answers import Part

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


POOL_BYTES = 2**29
"""Memory for views, so that they are made only once for all teachers."""


class Lessons:
    """What members are taught on: numbered views of the data, and outliers.

    Args:
        data: Batches, the same at each pass.
        outliers: `"auto"`, batches, batches by family, or None.
        settings: Only `views` is read, and whether labels are needed (`distill` below 1).
        seed: Determines the views and the outliers' order.
        augment: Whether views after the first are augmented.
    """

    def __init__(
        self, data: Any, outliers: Any, settings: Settings, *, seed: int, augment: bool
    ) -> None:
        self.seed, self.views = seed, settings.views
        self._pools: dict[tuple[str, int], Any] = {}
        self._room = POOL_BYTES
        makes = outliers == "auto" if isinstance(outliers, str) else False
        if isinstance(outliers, str) and not makes:
            raise ValueError(f'outliers is {outliers!r}; expected batches, a mapping, or "auto".')
        if isinstance(data, Batches) and "input_ids" in _names(data):
            data = list(data)  # texts keep one padding, so that the trunk's outputs can be cached
        wanted = makes or (augment and self.views > 1)
        self._views = Views(data, seed=seed, augment=augment) if wanted else None
        if self._views is None:
            self.views = 1
        self.data = numbered(data, need_labels=settings.distill < 1)
        self.given: list[Any] | None = None
        self.kinds: list[str] = list(self._views.kinds) if makes and self._views else []
        if outliers is not None and not makes:
            families = outliers if hasattr(outliers, "items") else {"outliers": outliers}
            self.kinds = list(families)
            batches = [b for family in families.values() for b in as_data(family)]
            if not batches:
                raise DataError("The outliers have no batches. Leave them out, or fill them.")
            self.given = list(numbered(batches, need_labels=False))
        self.count = sum(len(b["samples"]) for b in self._in_order(self.data))
        self.parts = [Part("data", self.count, self.views, self._batches("data"))]
        if self.given is not None:
            total = sum(len(b["samples"]) for b in self.given)
            self.parts.append(Part("outliers", total, 1, self._batches("outliers")))
        elif makes:
            self.parts.append(Part("outliers", self.count, self.views, self._batches("outliers")))

    def outlier_cycle(self) -> Cycle | None:
        """Return the outliers in their own order, or None if there are none."""
        if len(self.parts) == 1:
            return None
        source = self.data if self.given is None else self.given
        return Cycle(Stream(source, seed=derive_seed("outliers", self.seed)))

    def number(self, part: str, view: int, samples: Tensor) -> Tensor:
        """Return one unique number per view of an example."""
        first = 0 if part == "data" else FIRST_NUMBER
        return first + view * self.count + samples

    def view_of(self, part: str, view: int, batch: dict[str, Any]) -> Any:
        """Return the view of a numbered batch."""
        if (part, view) in self._pools:
            return take(self._pools[part, view], batch["samples"])
        if part == "outliers" and self.given is None:
            assert self._views is not None
            return self._views.destroyed(batch["batch"], batch["samples"], view)
        if self._views is None or part == "outliers":
            return batch["batch"]
        return self._views.light(batch["batch"], batch["samples"], view)

    def numbered_views(self) -> Iterator[dict[str, Any]]:
        """Yield all views of all examples, numbered, in a fixed order."""
        for part in self.parts:
            source = self.given if part.name == "outliers" and self.given else self.data
            for view in range(part.views):
                for batch in self._in_order(source):
                    samples = self.number(part.name, view, batch["samples"])
                    yield {
                        **batch,
                        "samples": samples,
                        "batch": self.view_of(part.name, view, batch),
                    }

    def _batches(self, part: str) -> Callable[[int], Iterable[Any]]:
        def batches(view: int) -> Iterator[Any]:
            source = self.given if part == "outliers" and self.given is not None else self.data
            changes = self._views is not None and (part == "outliers" or view > 0)
            shown: list[Any] = []
            for batch in self._in_order(source):
                shown.append(without_labels(self.view_of(part, view, batch)))
                yield shown[-1]
                if not changes or (part, view) in self._pools or _bytes(shown) > self._room:
                    shown.clear()
                    changes = False
            if shown and (pool := _pool(shown)) is not None:
                self._pools[part, view] = pool
                self._room -= _bytes(shown)

        return batches

    def _in_order(self, data: Any) -> Iterator[Any]:
        return Stream(data, seed=0, shuffle=False).epoch(0)


def _bytes(batches: Sequence[Any]) -> int:
    leaves = [leaf for batch in batches for _, leaf in columns(batch) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _names(data: Batches) -> tuple[str, ...]:
    first = next(iter(data.subset([0])))
    return tuple(first) if hasattr(first, "keys") else ()
