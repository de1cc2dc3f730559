"""Which of several processes this is, by the launcher's environment; torch is not imported."""

from __future__ import annotations

import os


def number() -> int:
    """Return this process's number under `torchrun` or `accelerate launch`; 0 by itself."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return int(os.environ.get("RANK", "0")) if several else 0


def is_first() -> bool:
    """Tell whether this process writes files and talks."""
    return number() == 0
