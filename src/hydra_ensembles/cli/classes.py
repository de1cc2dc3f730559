"""Class names: what folders are called against what a model's classes are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError


def class_count(model: Any) -> int | None:
    """Return how many classes a model tells apart, or None when it does not say."""
    for place in (model, getattr(model, "host", None), getattr(model, "config", None)):
        for key in ("num_classes", "num_labels"):
            found = getattr(place, key, None)
            if isinstance(found, int) and found > 0:
                return found
    return None


def names_for_folder(
    folder: Path, model: str, known: Sequence[Sequence[str] | None], count: int | None
) -> list[str] | None:
    """Return the class names of a model as the subfolders of an image folder spell them.

    `tench`, `Tench` and `n01440764` are the class `tench, Tinca tinca` of an ImageNet model.

    Args:
        folder: With a subfolder a class, which need not all be there.
        model: What the model is called.
        known: Lists of names in the order of the model's classes, the first for people.
        count: How many classes the model has, when that is known.
    """
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    lists = [list(names) for names in known if names]
    if not found:
        return lists[0] if lists else None
    if not lists:
        if count is not None and len(found) != count:
            raise DataError(
                f"{folder} has {len(found)} class subfolders, but {model} has {count} classes "
                "without names. Give their names in the model's order with --class-names FILE."
            )
        return None
    for names in lists:
        spelled = _spelled(found, names)
        if spelled is not None:
            return spelled
    strange = next(name for name in found if _spelled([name], lists[0]) is None)
    some = ", ".join(lists[0][:5]) + (", ..." if len(lists[0]) > 5 else "")
    raise DataError(
        f"The subfolder {strange!r} of {folder} is none of the {len(lists[0])} classes of {model} "
        f"({some}). Rename it, or give your names in the model's order with --class-names FILE."
    )


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


def _spelled(found: Sequence[str], names: list[str]) -> list[str] | None:
    """Return the names with those that were found spelled as found; None when one is missing."""
    if set(found) <= set(names):
        return names
    places: dict[str, int | None] = {}
    for number, name in enumerate(names):
        key = _plain(name)
        places[key] = None if key in places else number  # two classes alike: neither is meant
    spelled = list(names)
    for name in found:
        place = places.get(_plain(name))
        if place is None:
            return None
        spelled[place] = name
    return spelled


def _plain(name: str) -> str:
    return " ".join(name.split(",")[0].lower().replace("_", " ").replace("-", " ").split())
