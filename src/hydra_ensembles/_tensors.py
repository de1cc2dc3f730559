"""Digests of tensors and models, and safetensors files that hold the digest of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ._records import SEAL, sha256_of, write_whole
from .errors import FormatError


def tensor_bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes without a copy; numpy has no bfloat16, so they are bytes first."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """Return a SHA-256 over the names, types, shapes and bytes of the tensors in a table."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, torch.Tensor):
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(tensor_bytes(tensor))
    return whole.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the names, types, shapes and bytes of a model's tensors."""
    return tensors_digest(model.state_dict())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], record: str = "") -> None:
    """Write tensors and a text as one safetensors file, whole, with their digest."""
    digest = sha256_of(f"{tensors_digest(tensors)} {record}".encode())
    write_whole(path, save(dict(tensors), metadata={"record": record, SEAL: digest}))


def read_tensors(path: Path, what: str, advice: str) -> tuple[dict[str, Tensor], str]:
    """Read what `write_tensors` wrote; see `read_json` for the arguments.

    A file of somebody else, without a digest, passes.
    """
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise FormatError(f"{path} is not {what} ({error}). {advice}") from None
    record: str = facts.get("record", "")
    digest = sha256_of(f"{tensors_digest(tensors)} {record}".encode())
    if facts.get(SEAL, digest) != digest:
        raise FormatError(
            f"{path} is damaged: its content does not match the SHA-256 in it. {advice}"
        )
    return tensors, record
