"""Cached prefixes: the hidden states that enter a layer, and the logits of any masks above it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batches import check_reiterable
from ..data.memory import free_memory, is_out_of_memory
from ..data.running import check_inputs, check_labels, evaluating, split_batch
from ..errors import DataError
from ..heads.masks import HeadMask
from ..hosts import HostModel
from .state import TensorStore
from .streams import Branch, Call, Engine, Replacement

CACHE_BYTES = 4 * 2**30
Rows = Sequence[Tensor]
Tick = Callable[[int], None]


@dataclass
class Outputs:
    """Logits of candidates on several data sets.

    Attributes:
        logits: By data set, [example, candidate, class], float32 on the CPU.
        labels: By data set that has them, [example].
    """

    logits: dict[str, Tensor]
    labels: dict[str, Tensor]

    def candidate(self, index: int) -> Outputs:
        """Return one candidate, as an ensemble of one member."""
        return Outputs({k: v[:, index : index + 1] for k, v in self.logits.items()}, self.labels)

    def members(self, indices: Sequence[int]) -> Outputs:
        """Return some candidates, as the members of an ensemble."""
        return Outputs({k: v[:, list(indices)] for k, v in self.logits.items()}, self.labels)

    def examples(self, rows: Mapping[str, Tensor]) -> Outputs:
        """Return some examples of every data set that `rows` names."""
        return Outputs(
            {name: self.logits[name][index] for name, index in rows.items()},
            {name: self.labels[name][index] for name, index in rows.items() if name in self.labels},
        )


class Prefix:
    """Hidden states entering a layer, for every batch of some data sets, under one mask below.

    Args:
        host: The host model.
        data: Data sets by name; each any re-iterable of batches.
        cache_bytes: Memory for hidden states; batches beyond it are recomputed from their inputs.
        labelled: Names of the data sets that must have labels.
        streams: How many candidates are folded into one call.
    """

    def __init__(
        self,
        host: HostModel,
        data: Mapping[str, Any],
        *,
        cache_bytes: int = CACHE_BYTES,
        labelled: Sequence[str] = ("id",),
        streams: int = 16,
    ) -> None:
        self.host = host
        self.data = dict(data)
        self.engine = Engine(host, streams=streams)
        self.layer = 0
        self.rows: list[Tensor] = []
        self.cache_bytes = cache_bytes
        self.labels: dict[str, Tensor] = {}
        self._cache: dict[tuple[str, int], tuple[Tensor, Call]] = {}
        self._used = 0
        self._sizes: dict[str, list[int]] = {}
        self._read(labelled)

    def _read(self, labelled: Sequence[str]) -> None:
        """Pass over all data once: embed it, keep what fits."""
        with evaluating(self.host.model):
            for name, batches in self.data.items():
                check_reiterable(batches, name=name)
                labels, sizes = [], []
                for index, batch in enumerate(batches):
                    where = f"batch {index} of the data set {name!r}"
                    check_inputs(batch, where)
                    x, call = self.engine.enter(batch)
                    found = split_batch(batch)[2]
                    if found is None and name in labelled:
                        raise DataError(
                            f"Batch {index} of the data set {name!r} has no labels: the search "
                            "needs them. Give (inputs, labels) or a mapping with 'labels'."
                        )
                    sizes.append(call.batch)
                    if found is not None and name in labelled:
                        labels.append(check_labels(found, where))
                    self._keep((name, index), x, call)
                if not sizes:
                    raise DataError(f"The data set {name!r} is empty: it gave no batch.")
                self._sizes[name] = sizes
                if labels:
                    self.labels[name] = torch.cat(labels)

    def _keep(self, key: tuple[str, int], x: Tensor, call: Call) -> None:
        size = x.numel() * x.element_size() + call.bytes()
        if key in self._cache:
            self._cache[key] = (x, call)
        elif self._used + size <= self.cache_bytes:
            self._used += size
            self._cache[key] = (x, call)

    @property
    def batches(self) -> int:
        """Number of batches of all data sets."""
        return sum(len(sizes) for sizes in self._sizes.values())

    @property
    def examples(self) -> dict[str, int]:
        """Number of examples by data set."""
        return {name: sum(sizes) for name, sizes in self._sizes.items()}

    @property
    def cached(self) -> int:
        """Number of batches whose states are kept."""
        return len(self._cache)

    def states(
        self, sets: Collection[str] | None = None
    ) -> Iterator[tuple[str, int, Tensor, Call]]:
        """Yield the states that enter the current layer; what is not kept is recomputed."""
        for name, batches in self.data.items():
            if sets is not None and name not in sets:
                continue
            sizes = self._sizes[name]
            if all((name, i) in self._cache for i in range(len(sizes))):
                for index in range(len(sizes)):
                    yield name, index, *self._cache[name, index]
                continue
            for index, batch in enumerate(batches):
                if (name, index) in self._cache:
                    yield name, index, *self._cache[name, index]
                    continue
                x, call = self.engine.enter(batch)
                self._check_same(name, index, batch, call)
                for layer, row in enumerate(self.rows):
                    x = self.engine.step(layer, x, call, [(0, row)])
                yield name, index, x, call

    def _check_same(self, name: str, index: int, batch: Any, call: Call) -> None:
        sizes = self._sizes[name]
        same = index < len(sizes) and sizes[index] == call.batch
        if same and name in self.labels:
            start = sum(sizes[:index])
            found = split_batch(batch)[2]
            before = self.labels[name][start : start + call.batch]
            same = found is not None and torch.equal(found.long().cpu(), before)
        if not same:
            raise DataError(
                f"The data set {name!r} gave other examples at a second reading (batch {index}). "
                "Give it in a fixed order (shuffle=False), or raise cache_bytes so that one "
                "reading is enough."
            )

    def advance(self, row: Tensor, *, tick: Tick | None = None) -> None:
        """Move up one layer, with these of its heads kept [heads]."""
        with evaluating(self.host.model):
            for (name, index), (x, call) in list(self._cache.items()):
                self._cache[name, index] = (
                    self.engine.step(self.layer, x, call, [(0, row)]),
                    call,
                )
                if tick is not None:
                    tick(1)
        self.rows.append(row.clone())
        self.layer += 1

    def logits(
        self,
        masks: Sequence[HeadMask | Rows],
        *,
        replacement: Callable[[str, int, Call], Replacement] | None = None,
        tick: Tick | None = None,
        store: TensorStore | None = None,
        label: str = "",
        sets: Collection[str] | None = None,
    ) -> Outputs:
        """Return the logits of the host under every mask; only rows from the current layer count.

        Args:
            masks: Masks, or gates by layer.
            replacement: What replaces heads of the *current* layer that are off (default: zero).
            tick: Called with the number of block runs that were done.
            store: Keeps the logits of every batch, so that a stopped search need not run it again.
            label: What the masks are called in the store.
            sets: Names of the data sets to run; all by default.
        """
        above = [[row.float() for row in mask][self.layer :] for mask in masks]
        chosen = [name for name in self.data if sets is None or name in sets]
        found: dict[str, list[Tensor]] = {name: [] for name in chosen}
        with evaluating(self.host.model):
            for name, index, x, call in self.states(chosen):
                key = f"{label}-{self._span(name, index)}"
                known = None if store is None else store.get(key)
                if known is None:
                    edit = None if replacement is None else replacement(name, index, call)
                    known = self._fitting_tree(x, call, above, edit, tick).float().cpu()
                    if store is not None:
                        store.put(key, known)
                elif tick is not None:
                    tick(len(masks) * (len(self.host) - self.layer))
                found[name].append(known)
        labels = {name: self.labels[name] for name in chosen if name in self.labels}
        for name, values in labels.items():
            check_labels(values, f"the data set {name!r}", classes=found[name][0].shape[-1])
        return Outputs({name: torch.cat(parts) for name, parts in found.items()}, labels)

    def _span(self, name: str, index: int) -> str:
        """Name a batch by its data set and examples, whatever the size of batches is."""
        sizes = self._sizes[name]
        start = sum(sizes[:index])
        return f"{list(self.data).index(name)}-{start}-{start + sizes[index]}"

    def _fitting_tree(
        self,
        x: Tensor,
        call: Call,
        above: list[list[Tensor]],
        edit: Replacement | None,
        tick: Tick | None,
    ) -> Tensor:
        """Run all masks on one batch, half as many at once whenever memory runs out."""
        while True:
            try:
                return self._tree(x, call, above, edit, tick)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.engine.streams < 2:
                    raise DataError(
                        f"Memory ran out on a batch of {call.batch} examples ({error}). Give the "
                        "search smaller batches, or less cache_bytes."
                    ) from error
            self.engine.streams //= 2
            free_memory()
            warnings.warn(
                f"Memory ran out: going on with {self.engine.streams} candidates at once.",
                stacklevel=3,
            )

    def _tree(
        self,
        x: Tensor,
        call: Call,
        above: list[list[Tensor]],
        edit: Replacement | None,
        tick: Tick | None,
    ) -> Tensor:
        """Run all masks on one batch, depth first: streams part only where masks do."""
        result: list[Tensor | None] = [None] * len(above)

        def climb(layer: int, x: Tensor, groups: list[list[int]]) -> None:
            if layer == len(self.host):
                logits = self.engine.read(x, call)
                for stream, group in enumerate(groups):
                    for mask in group:
                        result[mask] = logits[:, stream]
                return
            branches: list[Branch] = []
            members: list[list[int]] = []
            for stream, group in enumerate(groups):
                places: dict[tuple[float, ...], int] = {}
                for mask in group:
                    row = above[mask][layer - self.layer]
                    key = tuple(row.tolist())
                    if key not in places:
                        places[key] = len(branches)
                        branches.append((stream, row))
                        members.append([])
                    members[places[key]].append(mask)
            width = self.engine.streams
            last = layer == len(self.host) - 1 and self.engine.own
            width = width * 64 if last and self.host.readout.tokens is not None else width
            for start in range(0, len(branches), width):
                chunk = branches[start : start + width]
                first, end = chunk[0][0], chunk[-1][0] + 1  # branches stand in the order of streams
                part = x[first * call.batch : end * call.batch]
                local = [(parent - first, row) for parent, row in chunk]
                y = self.engine.step(
                    layer, part, call, local, edit if layer == self.layer else None
                )
                if tick is not None:
                    tick(len(chunk))
                climb(layer + 1, y, members[start : start + width])

        climb(self.layer, x, [list(range(len(above)))])
        return torch.stack(result, 1)  # type: ignore[arg-type]
