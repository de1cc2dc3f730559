"""The data sets of a search: in-distribution data, outliers, proxies and shifts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..data.batches import images_of, with_images
from ..data.corruptions import corrupt
from ..data.loaders import Mapped, check_reiterable
from ..data.proxies import ImageContext, make_proxies
from ..data.proxies.base import spread
from ..errors import DataError
from ..hosts.host_data import data_for, sets_for


def outlier_sets(model: Any, id: Any, ood: Any, *, seed: int = 0) -> dict[str, Any]:
    """Return outlier data by name.

    Args:
        model: The host that the data is for.
        id: In-distribution data that proxies are made from.
        ood: Data, a dict of data by family, `"auto"` (proxies) or None.
        seed: Seed of the proxies.
    """
    if ood is None:
        return {}
    if isinstance(ood, str):
        if ood != "auto":
            raise DataError(f'ood={ood!r}: expected data, a dict of data by family, or "auto".')
        proxies = make_proxies(id, "auto", seed=seed)
        return {f"ood/proxy-{name}": data for name, data in proxies.items()}
    return {f"ood/{name}": data for name, data in sets_for(model, ood).items()}


def search_sets(
    model: Any, id: Any, *, ood: Any, shift: Any, needs: Iterable[str], average: bool = False
) -> dict[str, Any]:
    """Return all data of a search by name."""
    known = data_for(model, id, name="id")
    sets: dict[str, Any] = {"id": known}
    needs = set(needs)
    if ood is None and ("ood" in needs or average):
        ood = "auto"
    sets.update(outlier_sets(model, known, ood))
    if shift is not None:
        sets["shift"] = data_for(model, shift, name="shift")
    elif "shift" in needs:
        sets["shift"] = shifted(known)
    return sets


def shifted(data: Any, *, seed: int = 0) -> Any:
    """Corrupt labelled data mildly: noise of severity 3 on images, 15 % of the tokens replaced."""
    first = next(iter(check_reiterable(data)))
    if images_of(first) is not None:
        bank = images_of(spread(data, 64, seed))
        assert bank is not None
        context = ImageContext.of(bank.cpu(), None, None)

        def noise(batch: Any, generator: torch.Generator) -> Any:
            images = images_of(batch)
            assert images is not None
            pixels = corrupt(
                context.to_pixels(images), "gaussian_noise", severity=3, generator=generator
            )
            return with_images(batch, context.from_pixels(pixels, images))

        return _seeded(data, noise, seed)
    if isinstance(first, Mapping) and "input_ids" in first:
        return _seeded(data, _exchange_tokens, seed)
    raise DataError("This data cannot be corrupted, which nll-shift needs: pass shift=.")


def _exchange_tokens(batch: Any, generator: torch.Generator) -> Any:
    """Replace 15 % of the tokens by others of the batch, except first tokens and padding."""
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    real = real & (torch.arange(ids.shape[1], device=ids.device) > 0)
    pool = ids[real]
    if not len(pool):
        return batch
    hit = (torch.rand(ids.shape, generator=generator) < 0.15).to(ids.device) & real
    pick = torch.randint(len(pool), ids.shape, generator=generator).to(ids.device)
    return {**batch, "input_ids": torch.where(hit, pool[pick], ids)}


def _seeded(data: Any, function: Callable[[Any, torch.Generator], Any], seed: int) -> Mapped:
    def start() -> Callable[[Any], Any]:
        generator = torch.Generator().manual_seed(seed)
        return lambda batch: function(batch, generator)

    return Mapped(data, start)
