"""The state of a training run as one safetensors file: tensors, and a JSON record in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._tensors import read_tensors, write_tensors
from ..errors import FormatError

FILE_NAME = "training.safetensors"
ADVICE = "Delete it to start the training again, or choose another folder."


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], record: Any) -> None:
    """Write `folder/training.safetensors` atomically: beside the old file, then renamed."""
    # clone: safetensors refuses tensors that share memory, as tied weights do
    owned = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_tensors(folder / FILE_NAME, owned, json.dumps(record))


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Any] | None:
    """Return the tensors and the record of a folder, or None if nothing was written there."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    kind = "a training checkpoint of this library"
    tensors, text = read_tensors(path, kind, ADVICE)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{path} is not {kind} ({error}). {ADVICE}") from None
    return tensors, record


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by `<parameter index>/<key>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}/{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: Mapping[str, Tensor]) -> None:
    """Load the state that `pack_optimizer` returned into a new optimizer."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in packed.items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
