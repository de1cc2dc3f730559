"""Files that are whole whenever a process ends: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place and rename it; a failure leaves what was there before."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
