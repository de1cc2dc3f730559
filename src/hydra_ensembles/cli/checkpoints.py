"""Weights in a file: safetensors, or a checkpoint of torch that holds tensors and plain data.

`torch.load(weights_only=True)` runs no code of the file; this module has the only call of it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FormatError

CHECKPOINTS = (".pth", ".pth.tar", ".pt", ".bin", ".ckpt")
WEIGHTS = (".safetensors", *CHECKPOINTS)
NESTED = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema")
PREFIXES = ("module.", "_orig_mod.", "model.")
VIT_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}


def is_weights_file(path: Path) -> bool:
    """Return whether a path is a file that is called like weights."""
    return path.is_file() and path.name.lower().endswith(WEIGHTS)


def read_weights(file: Path) -> dict[str, Any]:
    """Return the tensors of a weights file by name; what trainers put around them is removed."""
    return _weights_in(_read(file), file)


def _weights_in(content: Any, file: Path) -> dict[str, Any]:
    """Return the tensors of what a weights file holds, or raise if there are none."""
    weights = _tensors(content)
    if not weights:
        raise FormatError(
            f"{file} holds no weights: found a {type(content).__name__}, expected what "
            "torch.save(model.state_dict(), file) writes."
        )
    return weights


def _read(file: Path) -> Any:
    """Return what a weights file holds."""
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    if not is_weights_file(file):
        raise FormatError(f"{file} is not a weights file: expected one of {', '.join(WEIGHTS)}.")
    import torch

    try:  # timm's trainer keeps its arguments in a Namespace, which holds data only
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged files and for code
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise FormatError(
                f"{file} holds Python objects, such as a whole pickled model. Unpickling them can "
                "run code, so it is not read. Where you trust the file, load it in Python and "
                "save its weights: torch.save(model.state_dict(), 'weights.pth')."
            ) from error
        raise FormatError(
            f"{file} is damaged or not a checkpoint of torch. Copy it again."
        ) from error


def advice(file: Path) -> str:
    """Say which model form works for a weights file, by what it holds."""
    content = _read(file)
    weights = _weights_in(content, file)
    patches, qkv = weights.get("patch_embed.proj.weight"), weights.get("blocks.0.attn.qkv.weight")
    trained_as = content.get("arch") if isinstance(content, Mapping) else None
    if isinstance(trained_as, str):  # as timm's trainer calls it
        return f"{file} holds weights of {trained_as}: give timm:{trained_as}@{file}."
    if patches is not None and qkv is not None:
        size = VIT_SIZES.get(qkv.shape[1], "SIZE")
        side, positions = patches.shape[-1], weights.get("pos_embed")
        tokens = 0 if positions is None else positions.shape[1]
        image = 224 if not tokens else side * int(tokens**0.5)
        kind = f"{size}_patch{side}_{image}"
        return (
            f"{file} holds weights of a timm model: give timm:NAME@{file} with the NAME that it "
            f"was trained under. Its sizes fit vit_{kind} and deit_{kind}, which normalise images "
            "differently."
        )
    if any(".embeddings." in name for name in weights):
        return (
            f"{file} holds weights of transformers without their config.json: give the folder "
            "that holds both, as save_pretrained() writes it."
        )
    return (
        f"{file} holds weights, but not which model they are of (first: {next(iter(weights))}). "
        f"For timm give timm:NAME@{file}; for transformers the folder with its config.json."
    )


def _tensors(content: Any) -> dict[str, Any]:
    """Find the state dict in a checkpoint, and drop a prefix that all names have."""
    from torch import Tensor

    while isinstance(content, Mapping):
        inner = next((content[n] for n in NESTED if isinstance(content.get(n), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        return {}
    weights = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for prefix in PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _read_safetensors(file: Path) -> dict[str, Any]:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        return dict(safetensors.torch.load_file(file))
    except SafetensorError as error:
        raise FormatError(f"{file} is damaged: {error}. Copy it again.") from error
