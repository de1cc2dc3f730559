"""Teachers: anything that gives class probabilities, opened one at a time."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._records import model_fingerprint, sha256_of
from ..data.modes import evaluating
from ..data.running import call_model, member_logits, member_logits_of
from ..errors import DataError, FormatError
from ..fusion.ensemble import HydraEnsemble
from .checkpoint import FILE_NAME, read_checkpoint, with_prefix

Answer = Callable[[Any], Tensor]
"""Maps a batch to log-probabilities `[batch, member, class]`; a plain model has one member."""


@dataclass(frozen=True)
class Teacher:
    """One source of probabilities.

    Attributes:
        name: Its name in errors and records.
        identify: Returns what distinguishes it from another teacher, for resuming.
        open: Loads it and yields its `Answer`; None for a table.
        table: Precomputed log-probabilities `[example, member, class]`, or None.
    """

    name: str
    identify: Callable[[], str]
    open: Callable[[], contextlib.AbstractContextManager[Answer]] | None = None
    table: np.ndarray | None = None


def read_teachers(teachers: Any, host: nn.Module) -> list[Teacher]:
    """Return the teachers that an argument of `distill` names; nothing is run yet."""
    if isinstance(teachers, nn.ModuleList):  # a list that is a module, but no model
        teachers = list(teachers)
    if isinstance(teachers, Mapping):
        teachers = list(teachers.values())
    single = isinstance(teachers, (nn.Module, str, os.PathLike, Tensor, np.ndarray))
    if single or teachers is None or (callable(teachers) and not isinstance(teachers, Sequence)):
        teachers = [teachers]
    result = [_read(teacher, host, place) for place, teacher in enumerate(teachers)]
    if not result:
        raise DataError("There are no teachers. Pass models, or make some with make_teachers().")
    return result


def _read(teacher: Any, host: nn.Module, place: int) -> Teacher:
    if isinstance(teacher, nn.Module):
        name = f"teacher {place} ({type(teacher).__name__})"
        return Teacher(name, lambda: _identity(teacher), lambda: _opened(teacher))
    if isinstance(teacher, (Tensor, np.ndarray)):
        name = f"teacher {place} (a table)"
        table = _table(torch.as_tensor(np.asarray(teacher)), name)
        return Teacher(name, lambda: sha256_of(np.ascontiguousarray(table).tobytes()), table=table)
    if isinstance(teacher, (str, os.PathLike)):
        return _from_path(Path(teacher), host)
    if callable(teacher):
        name = f"teacher {place} ({getattr(teacher, '__name__', type(teacher).__name__)})"
        return Teacher(name, lambda: name, lambda: _called(teacher, name))
    raise DataError(
        f"Teacher {place} is a {type(teacher).__name__}; expected a model, a HydraEnsemble, a "
        "callable, a table of probabilities [example, class] or a path to one of these."
    )


def _from_path(path: Path, host: nn.Module) -> Teacher:
    """Read a table, a checkpoint of the host, a saved ensemble or a saved host."""
    if not path.exists():
        raise DataError(f"The teacher {path} does not exist. Expected a file or a folder.")
    name = str(path)
    if path.is_dir() and (path / FILE_NAME).exists():
        path = path / FILE_NAME
    if path.is_dir():
        return Teacher(name, lambda: _files_sha(path), lambda: _opened(_from_folder(path, host)))
    if path.suffix == ".npy":
        table = _table(torch.from_numpy(np.load(path, allow_pickle=False)), name)
        return Teacher(name, lambda: _files_sha(path), table=table)
    if path.suffix != ".safetensors":
        raise DataError(
            f"The teacher {path} has an unknown suffix; expected a folder, .npy or .safetensors."
        )
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if len(names) == 1 or "probabilities" in names:
            key = names[0] if len(names) == 1 else "probabilities"
            table = _table(file.get_tensor(key), name)
            return Teacher(name, lambda: _files_sha(path), table=table)
    return Teacher(name, lambda: _files_sha(path), lambda: _opened(_from_weights(path, host)))


def _from_folder(folder: Path, host: nn.Module) -> nn.Module:
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_text()).get("format") == "hydra-ensembles":
        return HydraEnsemble.from_pretrained(folder)
    load = getattr(type(host), "from_pretrained", None)
    if callable(load):
        of_transformers = type(host).__module__.startswith("transformers.")
        return load(folder, use_safetensors=True) if of_transformers else load(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if len(weights) != 1:
        raise FormatError(
            f"The teacher's folder {folder} holds {len(weights)} .safetensors files; expected one "
            f"with weights of {type(host).__name__}, or a folder of save_pretrained()."
        )
    return _from_weights(weights[0], host)


def _from_weights(path: Path, host: nn.Module) -> nn.Module:
    """Return a copy of the host with the weights of a training checkpoint or a plain file."""
    from safetensors.torch import load_file

    state: dict[str, Tensor]
    if path.name == FILE_NAME:
        saved = read_checkpoint(path.parent)
        assert saved is not None
        state = with_prefix(saved[0], "best/") or with_prefix(saved[0], "model/")
    else:
        state = load_file(path)
    result = copy.deepcopy(host)
    missing, unknown = result.load_state_dict(state, strict=False)
    if unknown or (missing and path.name != FILE_NAME):
        raise FormatError(
            f"The weights in {path} do not fit {type(host).__name__}: "
            f"{', '.join([*unknown, *missing][:3])} differ. Give a checkpoint of this model."
        )
    return result


@contextlib.contextmanager
def _opened(model: nn.Module) -> Iterator[Answer]:
    with evaluating(model):
        yield lambda batch: member_logits(model, batch).detach().float().log_softmax(-1).cpu()


@contextlib.contextmanager
def _called(function: Callable[..., Any], name: str) -> Iterator[Answer]:
    def answer(batch: Any) -> Tensor:
        values = member_logits_of(call_model(function, batch)).detach().float().cpu()
        return log_probabilities(values, name)

    with torch.no_grad():
        yield answer


def log_probabilities(values: Tensor, name: str) -> Tensor:
    """Return log-probabilities of values that are probabilities or, failing that, logits."""
    values = values.float()
    if not bool(values.isfinite().all()):
        raise DataError(f"The answers of {name} hold NaN or infinity.")
    if bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < 1e-3).all()):
        return values.clamp_min(1e-12).log().log_softmax(-1)
    return values.log_softmax(-1)


def _table(values: Tensor, name: str) -> np.ndarray:
    if values.ndim not in (2, 3) or not len(values):
        raise DataError(
            f"The table of {name} has shape {list(values.shape)}; expected [example, class] or "
            "[example, member, class]."
        )
    values = values[:, None] if values.ndim == 2 else values
    return log_probabilities(values, name).numpy()


def _identity(model: nn.Module) -> str:
    known = [getattr(model, name, None) for name in ("temperature", "member_temperatures")]
    return f"{model_fingerprint(model)} {known}"


def _files_sha(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()
