"""Resuming a search: finished steps and tensors, each file written atomically."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .._records import SEAL, check_same_run, read_sealed, sealed, write_whole
from .._tensors import read_tensors, write_tensors
from ..data import processes
from ..errors import FormatError

VERSION = 1
ADVICE = "Delete it to start again, or give another folder."


def read_state(path: Path) -> dict[str, Any]:
    """Read the file of a `SearchState`: its version, settings and steps; raise if damaged."""
    saved = read_sealed(path, "the state of a search", ADVICE)
    keys = {"version", "settings", "steps"}
    if saved.keys() - {SEAL} != keys:
        problem = f"it has {', '.join(sorted(saved))[:80]}, expected {', '.join(sorted(keys))}"
    elif not (isinstance(saved["steps"], list) and isinstance(saved["settings"], dict)):
        problem = "its steps or settings are not tables"
    else:
        return saved
    raise FormatError(f"{path} is not the state of a search: {problem}. {ADVICE}")


class SearchState:
    """A JSON file of the finished steps of a search.

    Of several processes, only the first reads and writes the file; all of them know its steps.

    Args:
        folder: Where to store it; None stores nothing.
        settings: What the search depends on (model, data, options): plain data. A state that was
            written under other settings is refused.
        name: Name of the file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        settings: dict[str, Any],
        *,
        name: str = "search.json",
    ) -> None:
        self.path = None if folder is None else Path(folder) / name
        self.settings = json.loads(json.dumps(settings))  # as JSON will read it back
        self.steps: list[Any] = []
        if processes.size() > 1:
            processes.check_same("the settings of the search", self.settings)
        if self.path is not None:
            self.steps = processes.on_first(partial(self._read, self.path))

    def _read(self, path: Path) -> list[Any]:
        if not path.exists():
            return []
        saved = read_state(path)
        version, settings, steps = saved["version"], saved["settings"], saved["steps"]
        if version != VERSION:
            raise FormatError(
                f"{path} was written as version {version}, this library reads {VERSION}. "
                "Give another folder."
            )
        check_same_run(path, settings, self.settings)
        return list(steps)

    def add(self, step: Any) -> None:
        """Store a finished step."""
        self.steps.append(step)
        if self.path is None or not processes.is_first():
            return
        state = {"version": VERSION, "settings": self.settings, "steps": self.steps}
        write_whole(self.path, json.dumps(sealed(state)))

    def find(self, key: str) -> list[Any]:
        """Return the values of finished steps under a key, in order."""
        return [step[key] for step in self.steps if key in step]


class TensorStore:
    """Tensors by name in a folder, for results of a search that are too large for JSON.

    Args:
        folder: Created for the first tensor. The caller checks, with a `SearchState` next to it,
            that its tensors belong to the search.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, or None if it is not stored."""
        path = self._path(name)
        if not path.exists():
            return None
        return read_stored(path)

    def put(self, name: str, tensor: Tensor) -> None:
        """Store a tensor."""
        write_tensors(self._path(name), {"tensor": tensor.contiguous()})

    def clear(self) -> None:
        """Remove all tensors."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read_stored(path: Path) -> Tensor:
    """Read one tensor's file of a `TensorStore`; raise if it is damaged."""
    advice = "Delete it: it will be computed again."
    tensors, _ = read_tensors(path, "a file with the logits of a search", advice)
    if tensors.keys() != {"tensor"}:
        raise FormatError(f"{path} does not hold the logits of a search. {advice}")
    return tensors["tensor"]
