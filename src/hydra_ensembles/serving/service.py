"""The service behind its endpoints: prepare inputs, queue them, count what was said."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import DataError
from ..prediction import Prediction
from ..runtime.images import PixelLimitError, open_image, pixel_count
from .backends import ASKS, Backend
from .batch_queue import Batcher, Row
from .drift_watch import DriftWatch
from .limits import Limits, Refusal
from .metrics import Metrics
from .turns import Turns

T = TypeVar("T")

SMALL = 16 * 2**10
"""Bytes of text that are read in the event loop; more work than that goes to a thread."""

LARGE = 2**20
"""Bytes or pixels from which on work takes turns."""


class Service:
    """A model that answers requests.

    Args:
        backend: The model.
        name: What clients call it.
        limits: What it takes at most.
        drift_window: Prediction per test for drift.
        drift_every: Least number of seconds between two tests.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        limits: Limits | None = None,
        drift_window: int = 500,
        drift_every: float = 10.0,
    ) -> None:
        self.backend, self.name, self.limits = backend, name, limits or Limits()
        self.metrics = Metrics(backend, name, self.limits.batch)
        self.ready = False
        self.batcher: Batcher
        self._drift_window, self._drift_every = drift_window, drift_every
        self._drift: DriftWatch | None = None
        self._scores: list[float] = []  # of answers since the last full window
        self._readers: ThreadPoolExecutor
        self._decoders: ThreadPoolExecutor
        self._turns: Turns

    def facts(self) -> dict[str, Any]:
        """Return what the page at `/` must know of the model."""
        backend = self.backend
        return {
            "name": self.name,
            "reads": backend.reads,
            "asks": backend.asks,
            "members": backend.members,
            "classes": backend.classes,
            "gives": backend.gives,
            "classNames": list(backend.class_names or []),
            "novelty": backend.has_novelty,
            "alarm": backend.alarm,
            "score": backend.score,
            "rule": backend.rule_in_words,
            "example": backend.example,
            "maxText": self.limits.text,
        }

    async def start(self) -> None:
        """Begin to answer."""
        cores = os.cpu_count() or 1
        large = max(1, cores - 1)  # a core stays free for the model and for small inputs
        self._readers = ThreadPoolExecutor(cores, thread_name_prefix="reader")
        self._decoders = ThreadPoolExecutor(large, thread_name_prefix="decoder")
        self._turns = Turns(self.limits.decoding, large)
        self.batcher = Batcher(self.backend.predict, self.limits, on_batch=self._note)
        self.metrics["queue_rows"].set_function(lambda: self.batcher.waiting)
        test = self.backend.drift(self._drift_window)
        if test is not None:
            self._drift = DriftWatch(
                test,
                self._drift_window,
                every=self._drift_every,
                on_window=self.metrics.note_window,
            )
        self.batcher.start()
        self.ready = True

    async def stop(self) -> None:
        """Answer what waits, then stop."""
        self.ready = False
        await self.batcher.close()
        self._readers.shutdown()
        self._decoders.shutdown()
        if self._drift is not None:
            self._drift.close()

    def _note(self, answers: Prediction, took: float, waits: Sequence[float]) -> None:
        self.metrics.note_batch(answers, took, waits)
        if self._drift is not None and answers.novelty_score is not None:
            self._scores.extend(answers.novelty_score.tolist())
            if len(self._scores) >= self._drift_window:
                self._drift.add(self._scores)
                self._scores = []

    async def read(self, size: int, function: Callable[[], T]) -> T:
        """Run work of a request, by its size in bytes or pixels.

        Short texts are read in the event loop, other small inputs in a thread. Large ones take
        turns in threads of their own.
        """
        if size <= SMALL and self.backend.reads == "text":
            return function()
        loop = asyncio.get_running_loop()
        if size <= LARGE:
            return await loop.run_in_executor(self._readers, function)
        await self._turns.take(size, self.limits.answer_seconds)
        try:
            return await loop.run_in_executor(self._decoders, function)
        finally:
            self._turns.give_back(size)

    def rows_of_texts(self, texts: Sequence[Any]) -> list[Row]:
        """Check texts and return them as rows."""
        if self.backend.reads != "text":
            raise Refusal(422, f"{self.name} reads images, not texts.")
        for row in texts:
            for text in self._texts_of(row):
                if not isinstance(text, str):
                    raise Refusal(422, f"Found {type(text).__name__} where a text was expected.")
                if len(text) > self.limits.text:
                    raise Refusal(
                        413,
                        f"A text has {len(text)} characters; at most {self.limits.text} are read. "
                        "Shorten it.",
                    )
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:
                    raise Refusal(422, "A text is not valid Unicode.") from None
        return self.counted(list(texts))

    def _texts_of(self, row: Any) -> list[Any]:
        """Return the texts of an input; refuse one that this model is not asked."""
        asks = self.backend.asks
        names = ASKS.get(asks, ())
        if isinstance(row, Mapping) and set(row) == set(names):
            return list(row.values())
        if asks == "question":
            raise Refusal(
                422, f"{self.name} answers questions: send a 'question' and its 'context'."
            )
        if isinstance(row, Mapping):
            what = "one text or two ('text', 'text_pair')" if names else "one 'text'"
            raise Refusal(422, f"{self.name} reads {what} per input; found {sorted(row)!r:.80}.")
        return [row]

    async def rows_of_images(self, contents: Sequence[bytes]) -> list[Row]:
        """Decode images and return them as rows; their sizes decide when it is their turn."""
        if self.backend.reads != "image":
            raise Refusal(422, f"{self.name} reads texts, not images.")
        self.counted(contents)
        sizes = await self.read(0, lambda: [pixel_count(content) for content in contents])
        too_large = (
            f"The images of this request have more than {self.limits.pixels} pixels. Make them "
            "smaller or send fewer."
        )
        if sum(sizes) > self.limits.pixels:
            raise Refusal(413, too_large)

        def decode() -> list[Row]:
            try:
                most = self.limits.pixels
                images = (open_image(content, most_pixels=most) for content in contents)
                return [self.backend.prepare(image) for image in images]
            except PixelLimitError:
                raise Refusal(413, too_large) from None
            except DataError as error:
                raise Refusal(422, str(error)) from None

        return await self.read(sum(sizes), decode)

    def counted(self, rows: Any) -> Any:
        """Return the inputs of a request; refuse none and too many."""
        if not rows:
            raise Refusal(422, "There is no input in this request.")
        if len(rows) > self.limits.rows:
            raise Refusal(
                413,
                f"The request has {len(rows)} inputs; at most {self.limits.rows} are taken. Send "
                "several requests.",
            )
        return rows

    async def answer(self, rows: Sequence[Row]) -> Prediction:
        """Answer the rows of one request, in time or not at all."""
        if not self.ready:
            raise Refusal(503, "The service is starting or stopping. Try again in a moment.")
        self.counted(rows)
        return await self._in_time(self.batcher.answer(rows))

    async def explain(self, row: Row) -> dict[str, Any] | None:
        """Say what speaks for a row's novelty, between two batches."""
        return await self._in_time(self.batcher.run_alone(lambda: self.backend.explain(row)))

    async def _in_time(self, work: Any) -> Any:
        seconds = self.limits.answer_seconds
        try:
            return await asyncio.wait_for(work, seconds)
        except asyncio.TimeoutError:
            raise Refusal(
                503,
                f"There was no answer within {seconds:g} seconds: the service is overloaded. Try "
                "again later.",
            ) from None
