"""Labels in files: numbers as they are, names as numbers, and the columns that hold them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError


def encode_labels(
    values: Sequence[Any],
    class_names: Sequence[str] | None,
    *,
    where: str,
    numbers_stay: bool = True,
) -> tuple[Tensor, list[str] | None]:
    """Turn labels into class numbers; return them with the class names.

    Whole numbers stay as they are (unless `numbers_stay` is False, for folders whose names are
    digits). Names become their index in `class_names`, by default the sorted names in the data.
    """
    numbers = _whole_numbers(values) if numbers_stay else None
    if numbers is not None:
        return torch.tensor(numbers), None if class_names is None else list(class_names)
    texts = [str(value) for value in values]
    names = sorted(set(texts)) if class_names is None else [str(name) for name in class_names]
    place = {name: number for number, name in enumerate(names)}
    unknown = next((value for value in texts if value not in place), None)
    if unknown is not None:
        raise DataError(
            f"The label {unknown!r} in {where} is none of the {len(names)} class names "
            f"({_some(names)}). Check class_names, or leave it out to use the names found."
        )
    return torch.tensor([place[value] for value in texts]), names


def pick_column(
    wanted: str | None, columns: Collection[str], usual: Sequence[str], what: str, where: str
) -> str:
    """Return the column to read: the given one, or the first usual name that exists."""
    if wanted is not None:
        if wanted in columns:
            return wanted
        similar = difflib.get_close_matches(wanted, list(columns), n=1)
        hint = f" Did you mean {similar[0]!r}?" if similar else ""
        raise DataError(f"{where} has no column {wanted!r}.{hint} Its columns: {_some(columns)}.")
    for name in usual:
        if name in columns:
            return name
    raise DataError(
        f"{where} has no {what} column under a usual name ({', '.join(usual)}). Its first line "
        f"must name the columns; name the one to read ({what}_column). Its columns: "
        f"{_some(columns)}."
    )


def _whole_numbers(values: Sequence[Any]) -> list[int] | None:
    try:
        numbers = [int(value) for value in values]
    except (TypeError, ValueError):
        return None
    if any(float(value) != number for value, number in zip(values, numbers, strict=True)):
        return None
    return numbers if all(number >= 0 for number in numbers) else None


def _some(names: Collection[str], most: int = 20) -> str:
    shown = list(names)[:most]
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, shown)) + more
