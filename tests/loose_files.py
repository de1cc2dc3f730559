"""Python files outside packages: experiments, examples, scripts of the docs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """Import a file by its place in the project."""
    name = path.removesuffix(".py").replace("/", "_")  # hides no package
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
