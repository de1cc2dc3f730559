"""Read class names, and match the names of folders with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError


def class_count(model: Any) -> int | None:
    """Return the number of a model's classes, or None if it is not known."""
    for place in (model, getattr(model, "host", None), getattr(model, "config", None)):
        for key in ("num_classes", "num_labels"):
            found = getattr(place, key, None)
            if isinstance(found, int) and found > 0:
                return found
    return None


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
    return [name.strip() for name in given.split(",")]


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
    places = _places(lists[0])
    strange = next(name for name in found if len(places(name)) != 1)
    first = ", ".join(lists[0][:5]) + (", ..." if len(lists[0]) > 5 else "")
    kind = (
        f"one of several classes of {model} alike"
        if places(strange)
        else (f"none of the {len(lists[0])} classes of {model} ({first})")
    )
    raise DataError(
        f"The subfolder {strange!r} of {folder} is {kind}. Rename it, or give your names in the "
        "model's order with --class-names FILE."
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
    """Return the names with those that were found spelled as found; None when one is not clear."""
    places, spelled = _places(names), list(names)
    for name in found:
        where = places(name)
        if len(where) != 1:
            return None
        spelled[where[0]] = name
    return spelled


def _places(names: Sequence[str]) -> Callable[[str], list[int]]:
    """Return what finds the classes of a name: those that are it exactly, else those alike."""
    exact: dict[str, list[int]] = {}
    alike: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        exact.setdefault(name, []).append(number)
        alike.setdefault(_plain(name), []).append(number)
    return lambda name: exact.get(name) or alike.get(_plain(name), [])


def _plain(name: str) -> str:
    return " ".join(name.split(",")[0].lower().replace("_", " ").replace("-", " ").split())
