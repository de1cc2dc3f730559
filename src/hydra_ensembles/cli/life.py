"""A sign of life from commands whose first words take long: importing torch alone takes seconds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import typer

FIRST, EVERY = 1.0, 10.0
"""Seconds without a word after which a command says what it does, and says so again."""


class SignOfLife:
    """A line on standard error while nothing else is said: `Loading MODEL ...`."""

    def __init__(self) -> None:
        self.quiet = False
        self.folder: Path | None = None  # that the command writes to
        self._ended = threading.Event()

    def soon(self, text: str) -> None:
        """Say so a second from now and every ten seconds, until something else is said."""
        self.cancel()
        if not self.quiet:
            self._ended = threading.Event()
            threading.Thread(target=_repeat, args=(text, self._ended), daemon=True).start()

    def cancel(self) -> None:
        """Say no more."""
        self._ended.set()


def _repeat(text: str, ended: threading.Event) -> None:
    start, wait = time.monotonic(), FIRST
    while not ended.wait(wait):
        passed = round(time.monotonic() - start)
        typer.echo(f"{text} ..." if wait == FIRST else f"{text} ({passed} s) ...", err=True)
        wait = EVERY


life = SignOfLife()
