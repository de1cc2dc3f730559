"""Labels in files: numbers as they are, names as numbers, and the columns that hold them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .class_names import Names, class_finder, first_spellings


def encode_labels(
    values: Sequence[Any],
    class_names: Names | None,
    *,
    where: str,
    numbers_stay: bool = True,
    stored: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Turn labels into class numbers; return them with what data tells of them.

    Whole numbers (and the `LABEL_1` of transformers) stay as they are. Names become their index in
    `class_names`. Without `class_names` the order is assumed: the sorted names.

    Args:
        values: The label of each example.
        class_names: Names in the order of the host's classes, or None.
        where: Where the labels are, for errors.
        numbers_stay: False for folders whose names are digits.
        stored: The names of the numbers, where the data has them.

    Returns:
        The numbers, with `class_names` (or None) and `assumed_order` (where an order that nobody
        gave is from, or None).
    """
    if stored is not None and class_names is not None:  # by name, since the orders may differ
        values = [stored[v] if isinstance(v, int) and v >= 0 else v for v in values]
    assumed = None if class_names is not None else f"sorted names of {where}"
    if class_names is None and stored is not None:
        class_names, assumed = stored, f"names in the order of {where}"
    numbers = _whole_numbers(values) if numbers_stay else None
    if numbers is not None:
        known = None if class_names is None else first_spellings(class_names)
        info = {"class_names": known, "assumed_order": None if known is None else assumed}
        return torch.tensor(numbers), info
    texts = [str(value) for value in values]
    found = sorted(set(texts))
    names = found if class_names is None else first_spellings(class_names)
    find = class_finder(names if class_names is None else class_names)
    place = {name: find(name) for name in found}
    unclear = next((name for name in found if len(place[name]) != 1), None)
    if unclear is not None:
        kind = "fits several" if place[unclear] else "is none"
        raise DataError(
            f"The label {unclear!r} in {where} {kind} of the {len(names)} class names "
            f"({_some(names)}). Give your names in the order of the model's classes with "
            "--class-names (class_names= in Python)."
        )
    info = {"class_names": names, "assumed_order": assumed}
    return torch.tensor([place[name][0] for name in texts]), info


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
    values = [v.removeprefix("LABEL_") if isinstance(v, str) else v for v in values]
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
