"""Progress of long work: a bar for a person, otherwise a line every ten seconds with an ETA.

On a terminal and in a notebook it is a bar. Elsewhere (a log file, a service, a pipe) it is a line
through the logger `hydra_ensembles` at level INFO; where no logging is set up at all, the line goes
to standard error. The first line comes a second after the start, however long a step takes; work
that is done by then says nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import DataError
from .processes import seems_first

logger = logging.getLogger("hydra_ensembles")
FIRST, EVERY = 1.0, 10.0
"""Seconds until the first line, and between lines."""

_quiet = False


def silence(quiet: bool = True) -> None:
    """Turn all progress off (or on again) for the whole process, as `--quiet` does."""
    global _quiet
    _quiet = quiet


def shows_bars() -> bool:
    """Return whether a person may be watching: on a terminal or in a notebook."""
    shell = sys.modules.get("IPython")
    interactive = shell.get_ipython() if shell is not None else None
    return sys.stderr.isatty() or type(interactive).__name__ == "ZMQInteractiveShell"


def announce(text: str, *, enabled: bool = True) -> None:
    """Report one line about the current work, where progress is reported."""
    if not _is_on(enabled):
        return
    if shows_bars():
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stderr)
    elif logger.hasHandlers():
        logger.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Format a time for people: `8 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """Counts steps and reports them.

    Args:
        description: Name of the work.
        total: Number of steps; None when unknown.
        enabled: Whether to report at all; never on other ranks than 0.
        unit: Name of the steps.
        done: Steps that are already done.
    """

    def __init__(
        self,
        description: str,
        total: int | None = None,
        *,
        enabled: bool = True,
        unit: str = "batches",
        done: int = 0,
    ) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.before = done
        self.figures = ""
        self._start = time.monotonic()
        self._bar: Any = None
        self._ended = threading.Event()
        self.enabled = _is_on(enabled)
        if not self.enabled:
            return
        if shows_bars():
            from tqdm.auto import tqdm

            self._bar = tqdm(
                desc=description, total=total, initial=done, leave=False, unit=unit, disable=False
            )
        else:
            threading.Thread(target=self._report, daemon=True, name="progress").start()

    def update(self, steps: int = 1) -> None:
        """Count finished steps."""
        self.done += steps
        if self._bar is not None:
            self._bar.update(steps)

    def show(self, figures: str) -> None:
        """Show figures next to the count, such as the loss."""
        self.figures = figures
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)

    def close(self) -> None:
        """End the report."""
        self._ended.set()
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Describe the state in a line: `heads: 3 of 12 batches, 25 %, about 40 s left`."""
        count = (
            f"{self.done} {self.unit}"
            if self.total is None
            else (f"{self.done} of {self.total} {self.unit}")
        )
        parts = [f"{self.description}: {count}"]
        if self.total:
            parts.append(f"{100 * self.done // self.total} %")
        new, passed = self.done - self.before, time.monotonic() - self._start
        if self.total and new and self.done < self.total:
            parts.append(f"about {duration(passed / new * (self.total - self.done))} left")
        if self.figures:
            parts.append(self.figures)
        return ", ".join(parts)

    def _report(self) -> None:
        wait = FIRST
        while not self._ended.wait(wait):
            announce(str(self))
            wait = EVERY


def length_of(data: Iterable[Any]) -> int | None:
    """Return the number of items; None for a stream that does not know it."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:  # a loader of an iterable data set has a __len__ that raises this
        return None


def progress_bar(
    data: Iterable[Any],
    *,
    description: str,
    enabled: bool = True,
    total: int | None = None,
    unit: str = "batches",
) -> Iterator[Any]:
    """Iterate over data and report the progress."""
    total = length_of(data) if total is None else total
    with Progress(description, total, enabled=enabled, unit=unit) as progress:
        for item in telling_lost_workers(data, description):
            yield item
            progress.update()


def telling_lost_workers(data: Iterable[Any], name: str) -> Iterator[Any]:
    """Iterate over data; raise a clear error when a process that loads it dies."""
    source = iter(data)
    while True:
        try:
            item = next(source)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            if not is_lost_worker(error):
                raise
            raise lost_worker(error, name) from error
        yield item


def is_lost_worker(error: BaseException) -> bool:
    """Return whether a process of a `DataLoader` died; torch has no error class for it."""
    if isinstance(error, RuntimeError):
        return "DataLoader worker" in str(error)
    # It may die after it announced a batch: then fetching the batch's memory from it fails.
    return isinstance(error, (OSError, EOFError)) and _was_fetching(error)


def _was_fetching(error: BaseException) -> bool:
    """Return whether an error occurred while memory was fetched from another process."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(
        frame.f_globals.get("__name__") == "multiprocessing.resource_sharer" for frame, _ in frames
    )


def lost_worker(error: BaseException, name: str) -> DataError:
    """Return the error for a data-loading process that died."""
    return DataError(
        f"A process that loads the {name} died ({' '.join(str(error).split())[:200]}). Finished "
        "steps are kept; start again. If it dies again, it may lack memory: use fewer workers "
        "(num_workers=0 has none) or smaller batches."
    )


def _is_on(enabled: bool) -> bool:
    return enabled and not _quiet and seems_first()
