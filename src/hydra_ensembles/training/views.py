"""What `distill` trains on: lightly augmented views of the data, and label-destroying variants.

Every view is a pure function of a seed, the example's number and the view's number. A teacher's
answer to it can therefore be computed once and saved, and a resumed run sees the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.batches import columns, describe, images_of, join, take, without_labels
from ..data.corruptions.base import Draws
from ..data.loaders import Batches, Data, as_data
from ..data.proxies import Context, ImageContext, Proxy, TokenContext, apply_proxy, proxies
from ..errors import DataError
from .outlier_exposure import FIRST_NUMBER, Cycle
from .sample_order import Stream, derive_seed, loader_like, numbered, pool
from .settings import Settings


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


IMAGE_VARIANTS = {
    **{name: proxies[name] for name in ("shuffle", "mix", "noise", "tile")},
    "invert": Proxy("image", _invert),
}
TEXT_VARIANTS = {name: proxies[name] for name in ("shuffle_words", "token_noise", "halves")}


class Views:
    """Makes views of numbered examples.

    Args:
        data: The examples; some of them are mixed into others.
        seed: Determines every draw.

    Attributes:
        kinds: Names of the label-destroying variants.
    """

    def __init__(self, data: Data, *, seed: int) -> None:
        first = next(iter(data))
        if images_of(first) is not None:
            self._light, self._proxies = Proxy("image", _light_images), IMAGE_VARIANTS
        elif _is_text(first):
            self._light, self._proxies = Proxy("text", _light_tokens), TEXT_VARIANTS
        else:
            raise DataError(
                "Views are made of images [B, C, H, W] or of token ids under 'input_ids'; "
                f"{describe(first)}. Set augment=False in the settings, and pass ood=None."
            )
        self.seed, self.kinds = seed, list(self._proxies)
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
        if view == 0:
            return batch
        seeds = self._seeds("light", samples, view)
        return apply_proxy(self._light, batch, seeds, self._context)

    def destroyed(self, batch: Any, samples: Tensor, view: int) -> Any:
        """Return a batch of label-destroying variants, one kind per example, chosen by its seed."""
        batch = without_labels(batch)
        seeds = self._seeds("destroyed", samples, view)
        kinds = seeds % len(self.kinds)
        order, variants = [], []
        for kind in kinds.unique().tolist():
            rows = (kinds == kind).nonzero().flatten()
            proxy = self._proxies[self.kinds[kind]]
            part = take(batch, rows.tolist())
            variants.append(apply_proxy(proxy, part, seeds[rows], self._context))
            order.append(rows)
        return take(join(variants), torch.cat(order).argsort().tolist())

    def _seeds(self, name: str, samples: Tensor, view: int) -> Tensor:
        numbers = [derive_seed(name, self.seed, view, i) >> 1 for i in samples.tolist()]
        return torch.tensor(numbers, dtype=torch.long)


POOL_BYTES = 2**28
"""Memory for the views of one set, so that they are made only once for all teachers."""

Change = Callable[[Any, Tensor, int], Any]
"""Makes a view of a batch from the examples' numbers and the view's number."""


class ExampleSet:
    """Numbered examples and their views: the data, or the outliers.

    Args:
        name: Used in the names of files and in errors.
        source: What `numbered` returns.
        views: Views per example.
        change: Makes the views; None shows the examples as they are.
        first: Number of the first view of the first example.
    """

    def __init__(
        self,
        name: str,
        source: list[Any] | DataLoader[Any],
        views: int = 1,
        change: Change | None = None,
        *,
        first: int = 0,
    ) -> None:
        self.name, self.source, self.views, self.first = name, source, views, first
        self.count = sum(len(batch["samples"]) for batch in self._in_order())
        self._change = change
        self._pools: dict[int, Any] = {}
        self._room = POOL_BYTES

    def view_of(self, view: int, batch: dict[str, Any]) -> Any:
        """Return the view of a numbered batch."""
        if view in self._pools:
            return take(self._pools[view], batch["samples"])
        if self._change is None:
            return batch["batch"]
        return self._change(batch["batch"], batch["samples"], view)

    def numbers(self, view: int, samples: Tensor) -> Tensor:
        """Return one unique number per view of an example."""
        return self.first + view * self.count + samples

    def batches(self, view: int) -> Iterator[Any]:
        """Yield the unlabelled batches of a view, in the order of the examples."""
        made: list[Any] = []
        room = 0 if view in self._pools else self._room
        for batch in self._in_order():
            shown = self.view_of(view, batch)
            room = 0 if shown is batch["batch"] else room  # not made: nothing to keep
            shown = without_labels(shown)
            yield shown
            room -= _bytes(shown)
            if room > 0:
                made.append(shown)
            else:
                made.clear()
        joined = pool(made) if made else None
        if joined is not None:
            self._pools[view], self._room = joined, room

    def numbered_views(self) -> Iterator[dict[str, Any]]:
        """Yield all views of all examples, numbered, in a fixed order."""
        for view in range(self.views):
            for batch in self._in_order():
                samples = self.numbers(view, batch["samples"])
                yield {**batch, "samples": samples, "batch": self.view_of(view, batch)}

    def _in_order(self) -> Iterator[Any]:
        if isinstance(self.source, DataLoader):  # also the last batch, which training may drop
            return iter(loader_like(self.source, drop_last=False))
        return iter(self.source)


class DistillationData:
    """What members are taught on: numbered views of the data, and outliers.

    Args:
        data: Batches, the same at each pass.
        outliers: `"auto"`, batches, batches by family, or None.
        settings: How many views are used, and whether labels are needed (`distill` below 1).
        seed: Determines the views and the outliers' order.

    Attributes:
        sets: The data and, if there are any, the outliers, by name.
        kinds: Kinds or families of the outliers.
        made: Whether the outliers are variants of the data.
    """

    def __init__(self, data: Any, outliers: Any, settings: Settings, *, seed: int) -> None:
        self.seed = seed
        if isinstance(outliers, str) and outliers != "auto":
            raise ValueError(f'ood is {outliers!r}; expected batches, a mapping, or "auto".')
        self.made = isinstance(outliers, str)
        if isinstance(data, Batches) and _is_text(next(iter(data.subset([0])))):
            data = list(data)  # texts keep one padding, so that the trunk's outputs can be cached
        views = min(settings.views, settings.epochs)
        light = settings.augment and views > 1
        maker = Views(data, seed=seed) if light or self.made else None
        source = numbered(data, need_labels=settings.distill < 1)
        self.kinds: list[str] = []
        self.sets = {
            "data": ExampleSet("data", source, views, maker.light)
            if light and maker
            else ExampleSet("data", source)
        }
        if self.made:
            assert maker is not None
            self.kinds = maker.kinds
            self.sets["outliers"] = ExampleSet(
                "outliers", source, views, maker.destroyed, first=FIRST_NUMBER
            )
        elif outliers is not None:
            families = outliers if hasattr(outliers, "items") else {"outliers": outliers}
            self.kinds = list(families)
            batches = [batch for family in families.values() for batch in as_data(family)]
            if not batches:
                raise DataError("The ood data has no batches. Pass ood=None, or fill it.")
            given = numbered(batches, need_labels=False)
            self.sets["outliers"] = ExampleSet("outliers", given, first=FIRST_NUMBER)

    def outlier_cycle(self) -> Cycle | None:
        """Return the outliers in their own order, or None if there are none."""
        if "outliers" not in self.sets:
            return None
        source = self.sets["outliers"].source
        return Cycle(Stream(source, seed=derive_seed("outliers", self.seed)))


def _is_text(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "input_ids" in batch


def _bytes(batch: Any) -> int:
    leaves = [leaf for _, leaf in columns(batch) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
