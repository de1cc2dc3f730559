"""What members are taught on: views of the data, and label-destroying variants of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..data.batches import Batches, as_data, columns, take, without_labels
from ..errors import DataError
from .answers import Part
from .numbered import numbered
from .outliers import FIRST_NUMBER, Cycle
from .settings import Settings
from .stream import Stream, _pool, derive_seed
from .views import Views

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
