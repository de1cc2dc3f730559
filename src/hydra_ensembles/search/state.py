"""Resuming a search: finished steps and tensors, each file written beside and renamed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .._records import check_same_run, write_whole
from ..errors import FormatError

VERSION = 1


class SearchState:
    """A JSON file that remembers finished steps of a search.

    Args:
        folder: Where to keep it; None keeps nothing.
        settings: What the search depends on (model, data, options): plain data. A state that was
            written under other settings is refused.
        name: Of the file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        settings: dict[str, Any],
        *,
        name: str = "search.json",
    ) -> None:
        self.path = None if folder is None else Path(folder) / name
        self.settings = json.loads(json.dumps(settings))  # as it will be read back
        self.steps: list[Any] = []
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            version, settings, steps = saved["version"], saved["settings"], saved["steps"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise FormatError(
                f"{path} is not the state of a search ({error}). Delete it, or give another folder."
            ) from None
        if version != VERSION:
            raise FormatError(
                f"{path} was written as version {version}, this library reads {VERSION}. "
                "Give another folder."
            )
        check_same_run(path, settings, self.settings)
        self.steps = steps

    def add(self, step: Any) -> None:
        """Remember a finished step."""
        self.steps.append(step)
        if self.path is None:
            return
        text = json.dumps({"version": VERSION, "settings": self.settings, "steps": self.steps})
        write_whole(self.path, text.encode())

    def find(self, key: str) -> list[Any]:
        """Return the values of finished steps under a key, in order."""
        return [step[key] for step in self.steps if key in step]


class TensorStore:
    """Tensors by name in a folder, for results of a search that are too large for JSON.

    Args:
        folder: Made when the first tensor is kept. Whoever opens it checks, with a `SearchState`
            beside it, that its tensors belong to the search.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, or None when it was not kept."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            return load_file(path)["tensor"]
        except (SafetensorError, KeyError) as error:
            raise FormatError(
                f"{path} does not hold the logits of a search ({error}). Delete it: it will be "
                "computed again."
            ) from None

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor."""
        write_whole(self._path(name), save({"tensor": tensor.contiguous()}))

    def clear(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)
