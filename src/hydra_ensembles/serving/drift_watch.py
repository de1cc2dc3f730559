"""Test the stream of answers for drift, in the background.

A test costs some tenths of a second of one core (2,000 permutations of the window and the known
scores), more than many batches. So a window is tested in a thread of its own, at most every few
seconds; on a busy service the rows between two tests are not looked at. No row is tested twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..uncertainty import Drift
    from ..uncertainty.drift import Window

log = logging.getLogger(__name__)

KEPT = 100
"""Tested windows that are remembered."""


class DriftWatch:
    """Collect novelty scores and test full windows.

    Args:
        test: A `Drift`; only this object uses it.
        window: Its window.
        every: Least number of seconds between two tests.
        on_window: Called with each tested window, in the background thread.
    """

    def __init__(
        self,
        test: Drift,
        window: int,
        *,
        every: float = 10.0,
        on_window: Callable[[Window], None] = lambda _: None,
    ) -> None:
        self._test, self._window, self._every, self._on_window = test, window, every, on_window
        self._scores: deque[float] = deque(maxlen=window)
        self._busy = threading.Event()
        self._next = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drift")

    def add(self, scores: Iterable[float]) -> None:
        """Add novelty scores of answers; start a test when a window is full and it is time."""
        self._scores.extend(scores)
        if len(self._scores) < self._window or self._busy.is_set():
            return
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        self._busy.set()
        window = list(self._scores)
        self._scores.clear()
        self._thread.submit(self._run, window)

    def _run(self, window: list[float]) -> None:
        try:
            self._test.add_scores(window)
            self._on_window(self._test.windows[-1])
            del self._test.windows[:-KEPT]
        except Exception:
            log.exception("the test for drift failed")
        finally:
            self._busy.clear()

    def close(self) -> None:
        """Wait for a running test, then stop."""
        self._thread.shutdown(wait=True)
