"""A sign of life from commands whose first words take long: importing torch alone takes seconds."""

from __future__ import annotations

import threading

import typer

FIRST = 1.0
"""Seconds without a word after which a command says what it does."""


class SignOfLife:
    """A line on standard error when nothing else was said for a while: `Loading MODEL ...`.

    On a terminal, where somebody waits, a text is shown at once and wiped out afterwards.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._timer: threading.Timer | None = None

    def soon(self, text: str) -> None:
        """Say so a second from now, unless something else is said before."""
        self.cancel()
        if not self.quiet:
            self._timer = threading.Timer(FIRST, lambda: typer.echo(text, err=True))
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Say nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


life = SignOfLife()
