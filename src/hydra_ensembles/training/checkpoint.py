"""The state of a training run as one safetensors file: tensors, and a JSON record in its header."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FormatError

FILE_NAME = "training.safetensors"
_HEADER = "hydra_training"


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], record: Any) -> None:
    """Write `folder/training.safetensors` beside the old one, then rename: it is always whole."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    target, beside = folder / FILE_NAME, folder / f"{FILE_NAME}.partial"
    # clone: safetensors refuses tensors that share memory, which trained weights may do
    owned = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(owned, beside, metadata={_HEADER: json.dumps(record)})
    os.replace(beside, target)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Any] | None:
    """Return the tensors and the record of a folder, or None if nothing was written there."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})[_HEADER])
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(
            f"{path} is not a training checkpoint of this library ({error}). "
            "Delete it to start the training again, or choose another folder."
        ) from error


def check_same_run(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint's settings are those of the run that wants to continue it."""
    differing = [key for key in now if saved.get(key) != now[key]]
    if differing:
        changes = "; ".join(
            f"{key}: {saved.get(key)!r} then, {now[key]!r} now" for key in differing
        )
        raise FormatError(
            f"The checkpoint in {folder} belongs to another run ({changes}). "
            "Use the same settings to resume, or another folder to start anew."
        )


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by `<parameter index>/<key>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}/{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: Mapping[str, Tensor]) -> None:
    """Give a freshly made optimizer the state that `pack_optimizer` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in packed.items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def digest(model: nn.Module) -> str:
    """Return a short SHA-256 of all parameters, to know a starting point again."""
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        total.update(name.encode())
        total.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, under the rest of the name."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
