"""The trunk cache: hidden states that enter a layer, and the logits of any masks above it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data import processes
from ..data.batches import check_inputs, split_batch
from ..data.eval_mode import evaluating
from ..data.loaders import check_reiterable
from ..data.padding import joined_rows
from ..data.processes import in_order, own_batches, own_numbers
from ..data.splits import BESIDE
from ..errors import DataError
from ..evaluation.metrics import negative_log_likelihood
from ..heads.head_mask import HeadMask
from ..hosts import HostModel
from ..tasks import MultiClass, Task
from ..uncertainty import Score
from .candidate_runs import Tick, candidate_logits
from .candidate_streams import Call, Engine, Replacement
from .search_state import TensorStore

CACHE_BYTES = 4 * 2**30
Rows = Sequence[Tensor]


@dataclass
class Outputs:
    """Outputs of candidates on several data sets.

    Attributes:
        logits: By data set, [example, candidate, ...], float32 on the CPU.
        labels: By data set that has them, [example, ...].
        task: What they mean.
    """

    logits: dict[str, Tensor]
    labels: dict[str, Tensor]
    task: Task = field(default_factory=MultiClass)

    def candidate(self, index: int) -> Outputs:
        """Return one candidate, as an ensemble of one member."""
        one = {name: values[:, index : index + 1] for name, values in self.logits.items()}
        return Outputs(one, self.labels, self.task)

    def losses(self, name: str) -> Tensor:
        """Return the loss of the candidates' mean for each example of a data set."""
        task, outputs = self.task, self.logits[name]
        if task.classifies:
            return negative_log_likelihood(outputs, self.labels[name])
        return task.losses(task.mean(outputs), self.labels[name])

    def score(self, name: str, score: str | Score) -> Tensor:
        """Return an uncertainty of each example; the task's usual one where it has not this."""
        known = not isinstance(score, str) or score in self.task.scores
        return self.task.score(self.logits[name], score if known else self.task.default_score)

    def examples(self, rows: Mapping[str, Tensor]) -> Outputs:
        """Return some examples of every data set that `rows` names."""
        return Outputs(
            {name: self.logits[name][index] for name, index in rows.items()},
            {name: self.labels[name][index] for name, index in rows.items() if name in self.labels},
            self.task,
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
        self._given: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._read(labelled)

    def _read(self, labelled: Sequence[str]) -> None:
        """Pass over all data once: embed it, keep what fits; each process keeps its own."""
        with evaluating(self.host.model):
            for name, batches in self.data.items():
                check_reiterable(batches, name=name)
                labels, sizes = [], []
                for found in in_order(batches, partial(self._enter, name, labelled), name=name):
                    sizes.append(int(found["size"]))
                    if "labels" in found:
                        labels.append(found["labels"])
                if not sizes:
                    raise DataError(f"The data set {name!r} is empty: it gave no batch.")
                self._sizes[name] = sizes
                if labels:
                    self.labels[name] = torch.cat(labels)

    def _enter(
        self, name: str, labelled: Sequence[str], index: int, batch: Any
    ) -> dict[str, Tensor]:
        """Embed one batch; return its size and its labels, where they are needed."""
        where = f"batch {index} of the data set {name!r}"
        check_inputs(batch, where)
        x, call = self.engine.enter(batch)
        _, inputs, found = split_batch(batch)
        if found is None and name in labelled:
            raise DataError(
                f"Batch {index} of the data set {name!r} has no labels: the search needs them. "
                "Give (inputs, labels) or a mapping with 'labels'."
            )
        self._keep((name, index), x, call)
        given = {key: value for key, value in inputs.items() if key in BESIDE}
        if found is not None and name in labelled:
            given["labels"] = self.host.task.check_labels(found, where)
        self._given[name, index] = given
        rows, labels = torch.zeros(call.batch, 1, 1), given.get("labels")
        if self.host.task.by_token:
            rows, labels = self._examples((name, index), torch.zeros(call.batch, 1, x.shape[1], 1))
        size = {"size": torch.tensor(len(rows))}
        return size if labels is None else {**size, "labels": labels}

    def _examples(self, key: tuple[str, int], logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs of a batch by example, as its task counts them, and their labels."""
        given = dict(self._given[key])
        labels = given.pop("labels", None)
        return self.host.task.examples(logits, labels, given)

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

    def over(
        self, name: str, work: Callable[[int, Tensor, Call], dict[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield `work(index, states, call)` of all batches of a data set, in their order.

        Several processes share the work; all of them get all results.
        """
        states = self._own_states(name)

        def next_one(index: int, _: Any) -> dict[str, Tensor]:
            one = next(states, None)
            if one is None:
                raise self._changed(name, index)
            return work(*one)

        numbers = list(range(len(self._sizes[name])))
        return in_order(numbers, next_one, name=f"states of {name}", ahead=1)

    def _own_states(self, name: str) -> Iterator[tuple[int, Tensor, Call]]:
        """Yield the states that enter the current layer; those not cached are recomputed."""
        numbers = own_numbers(len(self._sizes[name]))
        if all((name, index) in self._cache for index in numbers):
            for index in numbers:
                yield index, *self._cache[name, index]
            return
        for index, batch in own_batches(self.data[name]):
            if (name, index) in self._cache:
                yield index, *self._cache[name, index]
                continue
            x, call = self.engine.enter(batch)
            self._check_same(name, index, batch, call)
            for layer, row in enumerate(self.rows):
                x = self.engine.step(layer, x, call, [(0, row)])
            yield index, x, call

    def _check_same(self, name: str, index: int, batch: Any, call: Call) -> None:
        _, inputs, found = split_batch(batch)
        given = {key: value for key, value in inputs.items() if key in BESIDE}
        if found is not None and name in self.labels:
            given["labels"] = found.cpu()
        before = self._given.get((name, index), {})
        same = (name, index) in self._given and before.keys() == given.keys()
        same = same and all(torch.equal(before[k], given[k].to(before[k])) for k in before)
        if not same or (not self.host.task.by_token and self._sizes[name][index] != call.batch):
            raise self._changed(name, index)

    def _changed(self, name: str, index: int) -> DataError:
        return DataError(
            f"The data set {name!r} gave other examples at a second reading (batch {index}). "
            "Use a fixed order (shuffle=False), or raise cache_bytes so that one reading is enough."
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
                    tick(processes.size())
        self.rows.append(row.clone())
        self.layer += 1

    def logits(
        self,
        masks: Sequence[HeadMask | Rows],
        *,
        replacement: Callable[[str, int, Call], Replacement] | None = None,
        tick: Tick | None = None,
        store: TensorStore | None = None,
        sets: Collection[str] | None = None,
    ) -> Outputs:
        """Return the logits of the host under every mask; only rows from the current layer count.

        Args:
            masks: Masks, or gates by layer.
            replacement: What replaces heads of the *current* layer that are off (default: zero).
            tick: Called with the number of finished block runs.
            store: Keeps the logits of every batch for a stopped search; of one list of masks only.
            sets: Names of the data sets to run; all by default.
        """
        above = [[row.float() for row in mask][self.layer :] for mask in masks]
        chosen = [name for name in self.data if sets is None or name in sets]
        found: dict[str, list[Tensor]] = {}

        def run(name: str, index: int, x: Tensor, call: Call) -> dict[str, Tensor]:
            # a batch is named by its data set and examples, whatever the size of batches is
            start = sum(self._sizes[name][:index])
            key = f"{list(self.data).index(name)}-{start}-{start + self._sizes[name][index]}"
            known = None if store is None else store.get(key)
            if known is None:
                edit = None if replacement is None else replacement(name, index, call)
                logits = candidate_logits(self.engine, self.layer, x, call, above, edit, tick)
                known = logits.float().cpu()
                if store is not None:
                    store.put(key, known)
            elif tick is not None:
                tick(len(masks) * (len(self.host) - self.layer) * processes.size())
            return {"logits": self._examples((name, index), known)[0]}

        with evaluating(self.host.model):
            for name in chosen:
                found[name] = [one["logits"] for one in self.over(name, partial(run, name))]
        labels = {name: self.labels[name] for name in chosen if name in self.labels}
        for name, values in labels.items():
            if not self.host.task.ragged:
                size = found[name][0].shape[-1]
                self.host.task.check_labels(values, f"the data set {name!r}", size=size)
        logits = {name: joined_rows(parts) for name, parts in found.items()}
        return Outputs(logits, labels, self.host.task)
