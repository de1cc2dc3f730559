"""Files that are whole whenever a process ends, JSON records, and whether two runs are the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FormatError

if TYPE_CHECKING:  # torch takes a second to import, and writing a file does not need it
    from torch import Tensor, nn


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place and rename it; a failure leaves what was there before.

    Folders that are missing are made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def to_record(
    kind: str,
    payload: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    indent: int | None = None,
) -> str:
    """Return a record as JSON text that names its kind; write it whole when a path is given."""
    text = json.dumps({"kind": kind, "version": 1, **payload}, indent=indent)
    if path is not None:
        write_whole(path, text + "\n")
    return text


def read_json(
    kind: str, source: str | os.PathLike[str], *, error: type[Exception] = FormatError
) -> Any:
    """Read JSON from text that starts with `{` or `[`, or from a file; `kind` is for errors."""
    text = str(source)
    if isinstance(source, os.PathLike) or not text.lstrip().startswith(("{", "[")):
        path = Path(source)
        if not path.exists():
            raise error(f"No file {path}: expected a {kind} saved by to_json().")
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as wrong:
        raise error(
            f"Not the JSON of a {kind} ({wrong}). It must come from {kind}.to_json()."
        ) from None


def read_record(
    kind: str, source: str | os.PathLike[str], *, error: type[Exception] = FormatError
) -> dict[str, Any]:
    """Read what `to_record` wrote, from text or from a file.

    Args:
        kind: The kind that it must have.
        source: JSON text, or a path.
        error: Raised when it is something else.
    """
    record = read_json(kind, source, error=error)
    name = record.get("kind") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or name != kind:
        raise error(
            f"Expected the JSON of a {kind} but found {name!r}. It must come from {kind}.to_json()."
        )
    if record.get("version", 1) != 1:
        raise error(
            f"This {kind} has version {record['version']}, and this library reads version 1. "
            "Update hydra-ensembles to read it."
        )
    return record


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def tensor_bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes without a copy; numpy has no bfloat16, so they are bytes first."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def model_fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the names, types, shapes and bytes of a model's tensors."""
    import torch

    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(tensor_bytes(tensor))
    return whole.hexdigest()


def check_same_run(
    where: str | os.PathLike[str], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise unless a saved run had the settings of the run that wants to continue it.

    Args:
        where: The file or folder, for the error.
        saved: Settings as they were read back from JSON.
        now: Plain data.
    """
    now = json.loads(json.dumps(now))  # as it would be read back: tuples become lists
    changed = sorted(key for key in {*saved, *now} if saved.get(key) != now.get(key))
    if changed:
        changes = "; ".join(
            f"{key} was {_short(saved.get(key))}, is {_short(now.get(key))}" for key in changed
        )
        raise FormatError(
            f"{os.fspath(where)} belongs to another run: {changes}. Use the same settings to "
            "resume, or start anew in another place."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
