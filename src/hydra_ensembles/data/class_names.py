"""Class names: those of a model, and which class a name of the data is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

IMAGENET = 1000
Names = Sequence[str | Sequence[str]]
"""One entry per class: its name, or several spellings of it, the first for people."""


def real_names(names: Mapping[Any, str] | None) -> list[str] | None:
    """Return names by class number; None without any, or for the LABEL_0 ... of transformers."""
    if not names or all(str(name).startswith("LABEL_") for name in names.values()):
        return None
    return [str(names[number]) for number in sorted(names, key=int)]


def model_names(model: Any) -> list[tuple[str, ...]] | None:
    """Return the class names that a model or ensemble brings along, with other spellings.

    Reads `id2label` (transformers, saved ensembles, zero-shot classifiers), then timm's label names
    and descriptions; a timm model with as many classes as ImageNet has ImageNet's.
    """
    for place in (model, getattr(model, "host", None)):
        for owner in (place, getattr(place, "config", None)):
            names = real_names(getattr(owner, "id2label", None))
            if names is not None:
                return [(name,) for name in names]
        settings, count = getattr(place, "pretrained_cfg", None), getattr(place, "num_classes", 0)
        if isinstance(settings, Mapping):  # a model of timm
            found = _label_names(settings, count)
            if found is not None or count == IMAGENET:
                return found or _imagenet_names()
    return None


def class_count(model: Any) -> int | None:
    """Return the number of a model's classes, or None if it is not known."""
    for place in (model, getattr(model, "host", None), getattr(model, "config", None)):
        for key in ("num_classes", "num_labels"):
            found = getattr(place, key, None)
            if isinstance(found, int) and found > 0:
                return found
    return None


def class_finder(names: Names) -> Callable[[str], list[int]]:
    """Return a function from a name to its classes: those of that spelling, else those alike.

    `tench` and `Tench` are like `tench, Tinca tinca`.
    """
    exact: dict[str, list[int]] = {}
    alike: dict[str, list[int]] = {}
    for number, entry in enumerate(names):
        for name in dict.fromkeys([entry] if isinstance(entry, str) else entry):
            exact.setdefault(name, []).append(number)
            if number not in alike.setdefault(_plain(name), []):
                alike[_plain(name)].append(number)
    return lambda name: exact.get(name) or alike.get(_plain(name), [])


def first_spellings(names: Names) -> list[str]:
    """Return the name of each class for people."""
    return [entry if isinstance(entry, str) else str(entry[0]) for entry in names]


def _plain(name: str) -> str:
    return " ".join(name.split(",")[0].lower().replace("_", " ").replace("-", " ").split())


def _label_names(settings: Mapping[str, Any], count: int) -> list[tuple[str, ...]] | None:
    """Return the label names of a timm model's settings, each with its description."""
    names, described = settings.get("label_names"), settings.get("label_descriptions") or {}
    if isinstance(names, Mapping):  # numbers may be left out
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number.get(number, f"class {number}") for number in range(count)]
    if not names or len(names) != count:  # of another classifier
        return None
    return [(str(n), *([str(described[n])] if n in described else [])) for n in names]


def _imagenet_names() -> list[tuple[str, ...]]:
    """Return ImageNet's class names, each with the name of its folder."""
    from timm.data import ImageNetInfo

    info: Any = ImageNetInfo("imagenet-1k")
    long = info.label_descriptions()
    short = [name.partition(",")[0] for name in long]
    many = Counter(short)  # two are called maillot: those keep their long names
    names = [s if many[s] == 1 else name for s, name in zip(short, long, strict=True)]
    return list(zip(names, info.label_names(), strict=True))
