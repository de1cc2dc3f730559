"""One run under accelerate, whose process-wide state is put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..data import processes
from ..errors import HydraError, MissingDependencyError


@contextlib.contextmanager
def accelerator(mixed_precision: str) -> Iterator[Any]:
    """Yield an `Accelerator`; afterwards put accelerate's process-wide state back."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError(
            "Training needs accelerate. Install it with: pip install 'hydra-ensembles[train]'."
        ) from error
    processes.size()  # before accelerate does: the process group must also carry CPU tensors
    # once a state exists, its precision holds for the whole process: never change a user's
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
