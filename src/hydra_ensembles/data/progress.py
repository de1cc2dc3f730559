"""Progress of long work: a bar for a person, otherwise a line every ten seconds with an ETA.

On a terminal and in a notebook it is a bar. Elsewhere (a log file, a service, a pipe) it is a line
through the logger `hydra_ensembles` at level INFO; where no logging is set up at all, the line goes
to standard error. The first line comes a second after the start, however long a step takes; work
that is done by then says nothing.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from .memory import telling_lost_workers
from .processes import seems_first

logger = logging.getLogger("hydra_ensembles")
FIRST, EVERY = 1.0, 10.0
"""Seconds until the first line, and between lines."""
LONG = 10.0
"""Seconds from which on work says beforehand how long it will take."""

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
    if not enabled or _quiet or not seems_first():
        return
    if shows_bars():
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stderr)
    elif logger.hasHandlers():
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def expects(enabled: bool = True) -> bool:
    """Return whether somebody wants to know how long work will take: a person, or a log."""
    watched = shows_bars() or (logger.hasHandlers() and logger.isEnabledFor(logging.INFO))
    return enabled and watched and not _quiet and seems_first()


def expect(what: str, seconds: float, *, enabled: bool = True) -> None:
    """Say beforehand how long work will take, if that is over `LONG` seconds."""
    if seconds >= LONG and expects(enabled):
        announce(f"{what}: about {duration(seconds)}")


def duration(seconds: float) -> str:
    """Format a time for people: `8 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class _Lines:
    """What tqdm writes to where nobody watches: each of its updates is announced as a line."""

    def write(self, text: str) -> None:
        if text.strip():
            announce(text.strip())

    def flush(self) -> None:
        pass


class Progress:
    """Counts steps and reports them: `heads: 3 of 12 batches, 25 %, 00:40 left, loss 0.5`.

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
        from tqdm.auto import tqdm

        enabled = enabled and not _quiet and seems_first()
        lines: dict[str, Any] = {}
        if not shows_bars():
            share = " of {total_fmt} {unit}, {percentage:.0f} %, {remaining} left" if total else ""
            form = "{desc}: {n_fmt}" + (share or " {unit}") + "{postfix}"
            # the thread below decides when to write; tqdm counts and formats
            lines = {"file": _Lines(), "bar_format": form, "position": 0}
            lines |= {"delay": FIRST, "mininterval": math.inf}
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=done,
            unit=unit,
            leave=False,
            disable=not enabled,
            **lines,
        )
        self._ended = threading.Event()

        def report() -> None:
            wait = FIRST
            while not self._ended.wait(wait):
                self._bar.refresh()
                wait = EVERY

        if enabled and lines:
            threading.Thread(target=report, daemon=True, name="progress").start()

    def update(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._bar.update(steps)

    def show(self, figures: str) -> None:
        """Show figures next to the count, such as the loss."""
        self._bar.set_postfix_str(figures, refresh=False)

    def close(self) -> None:
        """End the report."""
        self._ended.set()
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
