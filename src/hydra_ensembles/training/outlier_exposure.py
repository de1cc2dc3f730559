"""Outliers that members learn to be unsure about (Outlier Exposure, Hendrycks et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..data.batches import without_labels
from ..data.proxies import make_proxies
from ..errors import DataError
from .sample_order import Stream, numbered

Outliers = str | Iterable[Any] | Mapping[str, Iterable[Any]]
FIRST_NUMBER = 2**40  # beyond the numbers of the data's own samples


def outlier_stream(outliers: Outliers, data: Iterable[Any], *, seed: int) -> Stream:
    """Return numbered, unlabelled outliers, in memory and in a seeded order.

    Args:
        outliers: Batches, or batches by family; "auto" for proxies made from the data, as many as
            it has samples, alternating between the kinds.
        data: What the members are trained on.
        seed: Determines the order.
    """
    if isinstance(outliers, str):
        if outliers != "auto":
            raise ValueError(f'ood is {outliers!r}; expected batches, a mapping, or "auto".')
        families = _proxies_by_turns(data)
    elif isinstance(outliers, Mapping):
        families = {name: list(batches) for name, batches in outliers.items()}
    else:
        families = {"outliers": list(outliers)}
    for name, batches in families.items():
        if not batches:
            raise DataError(f"The outliers {name!r} have no batches. Leave them out, or fill them.")
    unlabelled = [without_labels(batch) for batches in families.values() for batch in batches]
    return Stream(numbered(unlabelled, need_labels=False, start=FIRST_NUMBER), seed=seed)


def _proxies_by_turns(data: Iterable[Any]) -> dict[str, list[Any]]:
    """Make kind i from batches i, i + k, ... for k kinds; with fewer batches, from all of them."""
    kinds = list(make_proxies(data))
    batches = list(data)
    transform = getattr(data, "transform", None)
    result = {}
    for place, kind in enumerate(kinds):
        family = make_proxies(
            batches[place :: len(kinds)] if len(batches) >= len(kinds) else batches,
            [kind],
            mean=getattr(transform, "mean", None),
            std=getattr(transform, "std", None),
            tokenizer=getattr(data, "tokenizer", None),
        )
        result[kind] = list(family[kind])
    return result


class Cycle:
    """The batches of a stream by a running number over epochs, so that a resumed run can skip."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._next = 0
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None

    def turn(self, number: int) -> int:
        """Return how often all batches were seen before batch `number`."""
        return number // len(self.stream)

    def at(self, number: int) -> Any:
        """Return batch `number`."""
        if number == self._next - 1:  # asked for again, part by part
            return self._last
        turn, place = divmod(number, len(self.stream))
        if number != self._next or place == 0:
            self._batches = self.stream.epoch(turn)
            for _ in range(place):
                next(self._batches)
        self._next = number + 1
        self._last = next(self._batches)
        return self._last
