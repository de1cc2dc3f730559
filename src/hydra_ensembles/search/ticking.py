"""Progress of searches, in block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..data.progress import Progress


@contextmanager
def ticker(name: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds finished work to the report."""
    with Progress(name, total, enabled=enabled, unit="block runs") as progress:
        yield progress.update
