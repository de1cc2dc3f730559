"""Let waiting inputs share one call of the model.

While the model works, inputs queue up; when it is free it takes all that wait, up to a batch. An
input that finds the model idle waits a moment for others. Inputs of different shapes do not mix:
the oldest one decides which kind goes next. When more texts wait than a batch holds, those nearest
in length to the oldest go with it, since they are padded to the longest of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..answer_each import InputError, answer_each
from ..prediction import Prediction, join
from .limits import Limits, Refusal

log = logging.getLogger(__name__)

Row = str | Mapping[str, str] | Mapping[str, np.ndarray]
"""One input: a text, named texts (a pair, or a question), or named arrays without a batch axis."""

Outcome = Prediction | Refusal
"""The prediction of one input, or why there is none."""

FAILED = "The model could not answer this input. If it is a tensor, check its values and shape."
BROKEN = "Something went wrong inside the service. Its log says what."
NOT_FINITE = "The model returned NaN or infinity for this input."


def texts_of(row: Row) -> list[str]:
    """Return the texts of an input; none when it is arrays."""
    if isinstance(row, str):
        return [row]
    return [value for value in row.values() if isinstance(value, str)]


def stacked(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return the arrays of rows, stacked by name."""
    arrays: list[Mapping[str, Any]] = [row for row in rows if not isinstance(row, str)]
    return {name: np.stack([row[name] for row in arrays]) for name in arrays[0]}


@dataclass(eq=False)
class Waiting:
    """The inputs of one request, until the last of them is answered."""

    future: asyncio.Future[list[Outcome]]
    outcomes: list[Outcome | None]
    left: int

    def settle(self, place: int, outcome: Outcome) -> None:
        """Note the outcome of one input; the last one wakes the request up."""
        self.outcomes[place] = outcome
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result([o for o in self.outcomes if o is not None])


@dataclass(eq=False)
class Entry:
    """One waiting input."""

    row: Row
    owner: Waiting
    place: int
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """Queue inputs and answer them in batches, in one thread of its own.

    Args:
        predict: The backend's; called in that thread only.
        limits: `batch`, `wait` and `queue` are used here.
        on_batch: Called after each batch with its answers, how long the model took and how long
            each input had waited, in seconds.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        limits: Limits,
        *,
        on_batch: Callable[[Prediction, float, Sequence[float]], None] = lambda *_: None,
    ) -> None:
        self._predict, self._limits, self._on_batch = predict, limits, on_batch
        self._kinds: dict[Hashable, deque[Entry]] = {}
        self.waiting = 0
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Begin to answer; call it where an event loop runs."""
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def answer(self, rows: Sequence[Row]) -> Prediction:
        """Answer the inputs of one request; raise a `Refusal` that says why not."""
        if self._closing:
            raise Refusal(503, "The service is stopping. Try again in a moment.")
        if self.waiting + len(rows) > self._limits.queue:
            raise Refusal(
                429,
                f"The queue is full: {self.waiting} inputs wait and at most {self._limits.queue} "
                "may. Try again a little later.",
            )
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        owner = Waiting(future, [None] * len(rows), len(rows))
        for place, row in enumerate(rows):
            self._kinds.setdefault(_kind(row), deque()).append(Entry(row, owner, place))
        self.waiting += len(rows)
        self._arrived.set()
        if self.waiting >= self._limits.batch:
            self._full.set()
        outcomes = await future
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                raise Refusal(outcome.status, str(outcome))
        return join([outcome for outcome in outcomes if isinstance(outcome, Prediction)])

    async def run_alone(self, function: Callable[[], Any]) -> Any:
        """Run something else in the model's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Answer what waits, then stop."""
        self._closing = True
        self._arrived.set()
        self._full.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.waiting:
                if self._closing:
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            await self._others()
            entries = self._take()
            if not entries:
                continue
            start = time.monotonic()
            waits = [start - entry.since for entry in entries]
            try:
                rows = [entry.row for entry in entries]
                parts = await loop.run_in_executor(self._thread, self._run, rows)
            except Exception:  # this loop must not end while anybody waits
                log.exception("a batch failed")
                parts = [Refusal(500, BROKEN)] * len(entries)
            took = time.monotonic() - start
            for entry, outcome in zip(entries, parts, strict=True):
                entry.owner.settle(entry.place, outcome)
            answered = [part for part in parts if isinstance(part, Prediction)]
            try:
                if answered:
                    self._on_batch(join(answered), took, waits)
            except Exception:
                log.exception("counting a batch failed")

    async def _others(self) -> None:
        """Give other inputs a moment to join the oldest one."""
        oldest = min(queue[0].since for queue in self._kinds.values())
        left = oldest + self._limits.wait - time.monotonic()
        if left <= 0 or self.waiting >= self._limits.batch or self._closing:
            return
        self._full.clear()
        try:
            await asyncio.wait_for(self._full.wait(), left)
        except asyncio.TimeoutError:
            return

    def _take(self) -> list[Entry]:
        """Take a batch of the oldest input's kind; leave out whom nobody waits for any more."""
        kind = min(self._kinds, key=lambda k: self._kinds[k][0].since)
        alive = [entry for entry in self._kinds[kind] if not entry.owner.future.done()]
        self.waiting -= len(self._kinds[kind]) - len(alive)
        taken = alive[: self._limits.batch]
        if len(taken) < len(alive):
            taken = _alike(alive, self._limits.batch)
        gone = set(map(id, taken))
        left = deque(entry for entry in alive if id(entry) not in gone)
        self.waiting -= len(taken)
        if left:
            self._kinds[kind] = left
        else:
            del self._kinds[kind]
        return taken

    def _run(self, rows: Sequence[Row]) -> list[Outcome]:
        """Answer rows together; a bad one never costs the others their answers."""

        def answers(part: list[Row]) -> list[Outcome]:
            prediction = self._predict(part)
            pairs = zip(prediction, prediction.finite, strict=True)
            return [one if finite else Refusal(422, NOT_FINITE) for one, finite in pairs]

        outcomes: list[Outcome] = []
        for outcome in answer_each(answers, rows):
            if isinstance(outcome, InputError):
                log.warning("the model failed on an input: %s", outcome)
                outcomes.append(Refusal(422, FAILED))
            else:
                outcomes.append(outcome)
        return outcomes


def _alike(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Return the oldest input and those nearest to its length: texts are padded to the longest."""
    lengths = {id(entry): sum(map(len, texts_of(entry.row))) for entry in entries}
    oldest = lengths[id(entries[0])]
    return sorted(entries, key=lambda entry: abs(lengths[id(entry)] - oldest))[:count]


def _kind(row: Row) -> Hashable:
    if isinstance(row, str):
        return "text"
    if texts_of(row):
        return tuple(row)
    arrays: Any = sorted(row.items())
    return tuple((name, array.shape, array.dtype.str) for name, array in arrays)
