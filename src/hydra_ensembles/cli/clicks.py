"""Click as typer has it: a dependency of its own in older versions, a part of it in newer ones."""

from __future__ import annotations

import importlib
from typing import Any

import typer


def click_module(name: str) -> Any:
    """Return a module of the click that typer runs on."""
    root = typer.BadParameter.__module__.rpartition(".")[0]
    return importlib.import_module(f"{root}.{name}")
