"""accelerate for one run, leaving the process as it was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..data import processes
from ..errors import HydraError, MissingDependencyError


@contextlib.contextmanager
def accelerator(mixed_precision: str) -> Iterator[Any]:
    """Yield an `Accelerator`, leaving accelerate's process-wide state as it was found."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError(
            "Training needs accelerate. Install it with: pip install 'hydra-ensembles[train]'."
        ) from error
    processes.size()  # meet the others before accelerate does, so that messages of the CPU pass
    # the precision is fixed for the whole process once a state exists: never touch a user's own
    foreign = AcceleratorState._shared_state.get("_mixed_precision")
    if foreign is not None and foreign != mixed_precision:
        raise HydraError(
            f"This process already runs accelerate with mixed_precision={foreign!r}, "
            f"but {mixed_precision!r} was asked for. Pass mixed_precision={foreign!r}."
        )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield Accelerator(mixed_precision=mixed_precision)
    finally:
        if foreign is None:
            AcceleratorState._reset_state()
