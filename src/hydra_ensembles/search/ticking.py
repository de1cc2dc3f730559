"""Progress of searches, in block runs, with the time that remains; shown on a terminal alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ticker(name: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds finished work to a bar."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not enabled or (distributed and torch.distributed.get_rank() != 0):
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=name, disable=None, leave=False, unit="block") as bar:
        yield lambda done: None if bar.disable else bar.update(done) and None
