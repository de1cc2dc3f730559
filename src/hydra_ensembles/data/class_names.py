"""Class names: those of a model, labels by name, and whether an assumed order is the model's."""

from __future__ import annotations

import csv
import difflib
import io
import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from .model_runs import collect_logits

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


def encode_labels(
    values: Sequence[Any],
    class_names: Names | None,
    *,
    where: str,
    numbers_stay: bool = True,
    stored: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Turn labels into class numbers; return them with what the data says about them.

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


LEAST, MOST = 5, 200
"""Fewest examples per class that are judged, and about how many examples are run in all."""
GAIN, ERRORS = 0.1, 3.0
"""Another order is better when it gains this share of examples, and this many standard errors."""


class ClassOrderError(DataError):
    """The class names of the data are not in the order of the model's classes."""


def check_class_order(model: Any, data: Any, *, name: str = "the model", seed: int = 0) -> None:
    """Raise when the order of class names that a reader assumed is not the model's.

    Does nothing for other data: integer labels, and names in an order that was given.

    A model with class names must have those of the data, in the same order. A model without is run
    on a few examples of every class: the assignment of names to classes that fits half of them
    best must not be clearly better on the other half. With fewer than `LEAST` examples of a class
    nothing is judged. Data is judged once, by the first model without names that meets it.

    Args:
        model: The plain model or ensemble: a pruned or attacked one may be wrong by system.
        data: What a reader of `hydra_ensembles.data` returned.
        name: What errors call the model.
        seed: Seed of the draw and of the halves.
    """
    assumed = getattr(data, "assumed_order", None)
    if not assumed:
        return
    names, known, classes = data.class_names, model_names(model), class_count(model)
    if known is not None:
        find = class_finder(known)
        if [find(label) for label in names] != [[number] for number in range(len(names))]:
            raise ClassOrderError(
                f"The classes are numbered by the {assumed} ({shown_order(names)}), but {name} "
                f"has the order {shown_order(first_spellings(known))}. Pass class_names= to the "
                "reader, with its names in that order."
            )
    elif classes is not None and classes != len(names):
        raise DataError(
            f"There are {len(names)} class names ({assumed}), but {name} has {classes} classes "
            "without names. Give their names in the model's order with --class-names "
            "(class_names= in Python)."
        )
    elif not data.info.get("judged") and (rows := _drawn(data.labels, len(names), seed)):
        logits, labels = collect_logits(
            model, data.subset(rows), name="class order", need_labels=True
        )
        assert labels is not None
        answers = logits.float().softmax(-1).mean(1).argmax(-1)
        fitted = better_order(answers, labels, logits.shape[-1], seed=seed)
        if fitted is not None and len(fitted.order) == len(names):
            line = io.StringIO()
            csv.writer(line, lineterminator="").writerow([names[place] for place in fitted.order])
            raise ClassOrderError(
                f"The assumed class order {shown_order(names)} ({assumed}) does not fit {name}: "
                f"{fitted.before:.0%} of {fitted.examples} examples are right, and "
                f"{fitted.after:.0%} with the order that fits best. If that is the model's, pass "
                f"--class-names {shlex.quote(line.getvalue())} (class_names= in Python)."
            )
        data.info["judged"] = True


class Fitted(NamedTuple):
    """An order that fits better than the assumed one, and how many of other examples fit.

    Attributes:
        order: By class, the number of its name.
        before, after: Accuracy with the assumed order and with this one.
        examples: Number of examples, which the order was not fitted to.
    """

    order: list[int]
    before: float
    after: float
    examples: int


def better_order(answers: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> Fitted | None:
    """Return an order of the classes that fits clearly better than the assumed one, or None.

    Fits a one-to-one assignment of labels to answered classes on half of the examples, stratified
    by label. On the other half, b examples are right by the assignment only and c by the assumed
    order only. The gain (b - c) / n has the standard error sqrt(b + c) / n if neither order is
    better (McNemar).

    Args:
        answers: The model's class for each example `[example]`.
        labels: Numbers in the assumed order `[example]`.
        classes: Number of the model's classes.
        seed: Seed of the halves.
    """
    from scipy.optimize import linear_sum_assignment

    order = _by_class(labels, seed)
    fit, test = order[::2], order[1::2]
    counts = torch.eye(classes, dtype=torch.float64) / 2  # ties keep the assumed order
    counts.index_put_((labels[fit], answers[fit]), torch.ones(len(fit)).double(), accumulate=True)
    assigned = torch.as_tensor(linear_sum_assignment(counts.numpy(), maximize=True)[1])
    before, after = answers[test] == labels[test], answers[test] == assigned[labels[test]]
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    if gained - lost < max(GAIN * len(test), ERRORS * math.sqrt(gained + lost), 1):
        return None
    return Fitted(
        assigned.argsort().tolist(),
        float(before.double().mean()),
        float(after.double().mean()),
        len(test),
    )


def shown_order(names: Sequence[str], most: int = 20) -> str:
    """Write an order for people: `cat=0, dog=1`."""
    shown = ", ".join(f"{name}={number}" for number, name in enumerate(names[:most]))
    return shown + (f", ... ({len(names)} classes)" if len(names) > most else "")


def _drawn(labels: Tensor, classes: int, seed: int) -> list[int] | None:
    """Draw some examples of every class; None when a class has too few."""
    counts = labels.bincount(minlength=classes).tolist()
    if min(counts) < LEAST:
        return None
    each = max(LEAST + 1, MOST // classes)
    parts = _by_class(labels, seed).split(counts)
    return sorted(row for part in parts for row in part[:each].tolist())


def _by_class(labels: Tensor, seed: int) -> Tensor:
    """Return the examples class after class, in a seeded order within each."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return order[labels[order].argsort(stable=True)]
