"""timm models by name: `timm:NAME`, or `timm:NAME@FILE` with your own weights."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ..errors import DataError, FormatError, MissingDependencyError, UnsupportedModelError
from .hub_cache import hub_access, not_cached


def is_timm_name(name: str) -> bool:
    """Tell whether a bare name, no folder and no hub name, is one of timm's models."""
    plain = name.partition("@")[0]
    if "/" in plain or ":" in plain or "_" not in plain or Path(name).exists():
        return False
    try:
        import timm
    except ImportError:
        return False
    return bool(timm.is_model(plain))


def load_timm(name: str) -> Any:
    """Make a timm model with pretrained weights, or with those of a safetensors file."""
    try:
        import timm
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} needs timm: pip install 'hydra-ensembles[timm]'."
        ) from error
    plain = name.removeprefix("timm:")
    if ":" not in plain:  # hf-hub:NAME@REVISION is timm's own
        plain, _, file = plain.partition("@")
        if not timm.is_model(plain):
            near = difflib.get_close_matches(plain.partition(".")[0], timm.list_models(), n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UnsupportedModelError(f"timm has no model {plain!r}.{hint}")
        if file:
            return _with_weights(timm, plain, Path(file).expanduser())
    with hub_access() as reached:
        try:
            return timm.create_model(plain, pretrained=True)
        except Exception as error:  # timm raises many kinds for unknown names and no network
            if not reached and "local-dir:" not in plain:
                hint = f" Weights at hand: timm:{plain}@FILE.safetensors."
                raise UnsupportedModelError(not_cached(name) + hint) from error
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedModelError(f"timm cannot make {plain!r}: {reason}") from error


def _with_weights(timm: Any, name: str, file: Path) -> Any:
    """Make a model with the weights of a file, and as many classes as they have."""
    import safetensors.torch
    from safetensors import SafetensorError

    if not file.is_file():
        raise DataError(f"There is no weights file {file} for timm:{name}.")
    if file.suffix != ".safetensors":
        raise FormatError(
            f"{file} is not a .safetensors file. Pickled weights can run code and are not read: "
            "convert them with safetensors.torch.save_file."
        )
    try:
        weights = safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise FormatError(f"{file} is damaged: {error}. Copy it again.") from error
    model = timm.create_model(name, pretrained=False)
    head = weights.get(f"{model.pretrained_cfg.get('classifier') or 'head'}.weight")
    if head is not None and len(head) != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=len(head))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[1:2] or lines)[:200]
        raise FormatError(f"The weights of {file} do not fit timm:{name}: {reason}") from error
    return model
