"""Class names on the command line: those that are given, and an order that is assumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import typer

from ..errors import DataError
from .launched import is_first
from .life import life
from .show import waiting


def read_names(given: str | None) -> list[str] | None:
    """Read class names from a file with one per line, or from `a,b,c`."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if path.is_file():
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        return [name for name in names if name]
    if "," not in given:
        raise DataError(f"--class-names {given}: no such file, and no list like cat,dog.")
    return [name.strip() for name in next(csv.reader([given], skipinitialspace=True))]


def check_labels(labels: Any, count: int | None, *, source: str, model: str) -> None:
    """Raise when data has a class that the model does not know."""
    if labels is None or count is None or not len(labels):
        return
    most = int(labels.max())
    if most >= count:
        raise DataError(
            f"{source} has the label {most}, but {model} has {count} classes (0 to {count - 1}). "
            "Is it the right label column?"
        )


def check_order(loaded: Any, data: Any) -> None:
    """Say which class order was assumed, if one was, and raise when another fits better.

    The next data of the model (a `Loaded`) is read in the same order.
    """
    from ..data.class_order import check_class_order, shown_order

    assumed = getattr(data, "assumed_order", None)
    if not assumed:
        return
    if is_first():  # a warning: also with --quiet
        life.cancel()
        typer.echo(
            f"Class order assumed: {shown_order(data.class_names)} ({assumed}; {loaded.name} has "
            "no class names). Pass --class-names to set it.",
            err=True,
        )
    with waiting("Checking the class order"):
        check_class_order(loaded.model, data, name=loaded.name)
    loaded.spellings = [(name,) for name in data.class_names]
