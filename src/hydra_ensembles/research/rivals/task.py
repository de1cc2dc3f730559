"""The table of rivals, and what each of them is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...data.loaders import check_reiterable
from ...errors import DataError
from ...registry import Registry

Baseline = Callable[..., nn.Module]

baselines: Registry[Baseline] = Registry("baseline")
"""Rivals by name: functions `(host, task, *, options) -> module` that do not change the host."""


@dataclass(frozen=True)
class Task:
    """What a rival may learn from, and how long.

    Attributes:
        name: The rival that it is for, in errors.
        train: Labelled batches to fine-tune on.
        validation: Labelled batches that no training has seen.
        ood: Outliers to validate on, data or a dict of data by family; their labels are ignored.
        members: Members of an ensemble.
        seed: Of every draw.
        epochs, learning_rate: Of fine-tuning.
        folder: Where checkpoints go, so that a stopped run resumes; None keeps none.
        progress: Show bars on a terminal.
    """

    name: str
    train: Iterable[Any] | None = None
    validation: Iterable[Any] | None = None
    ood: Iterable[Any] | None = None
    members: int = 3
    seed: int = 0
    epochs: int = 3
    learning_rate: float = 1e-4
    folder: Path | None = None
    progress: bool = True

    def need(self, kind: str) -> Iterable[Any]:
        """Return the data of a kind, or raise an error that says what it is wanted for."""
        data: Iterable[Any] | None = getattr(self, kind)
        if data is None:
            what = "outliers" if kind == "ood" else "labelled batches"
            raise DataError(
                f"The baseline {self.name!r} needs {kind} data, but {kind}=None. "
                f"Pass {kind}=<{what}>."
            )
        check_reiterable(data, name=kind)
        return data

    @property
    def seeds(self) -> list[int]:
        """One seed per member."""
        return [self.seed + member for member in range(self.members)]

    def training(self) -> dict[str, Any]:
        """Return the arguments of `finetune` that every rival shares."""
        return {
            "epochs": self.epochs,
            "learning_rate": self.learning_rate,
            "folder": self.folder,
            "progress": self.progress,
        }


def make_baseline(
    name: str,
    host: nn.Module,
    *,
    train: Iterable[Any] | None = None,
    validation: Iterable[Any] | None = None,
    ood: Iterable[Any] | None = None,
    members: int = 3,
    seed: int = 0,
    epochs: int = 3,
    learning_rate: float = 1e-4,
    folder: str | Path | None = None,
    progress: bool = True,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a rival from a pretrained host, which is left as it was.

    The result answers a batch with logits `[batch, class]` or `[batch, member, class]`, so that
    `evaluate` takes it. Its attribute `score`, where it has one, names the score that carries its
    uncertainty: `evaluate(rival, ..., score=getattr(rival, "score", "msp"))`.

    Example:
        >>> rival = make_baseline("deep-ensemble", model, train=train, members=3)

    Args:
        name: Of a rival in `baselines`.
        host: A trained classifier.
        train: Labelled batches, for rivals that are trained.
        validation: Labelled held-out batches.
        ood: Outliers (data, or a dict of data by family), for rivals that see such data.
        members: Members of an ensemble, at least one.
        seed: Of every draw.
        epochs: Passes over `train`, where something is fine-tuned.
        learning_rate: Peak of fine-tuning's schedule.
        folder: Where checkpoints go (below the rival's name); None keeps none.
        progress: Show bars on a terminal.
        options: The rival's own options by name; see its function.
    """
    make = baselines[name]
    if not isinstance(host, nn.Module):
        raise TypeError(f"The host is a {type(host).__name__}; expected a torch module.")
    if members < 1 or epochs < 1:
        raise ValueError(f"members={members}, epochs={epochs}: expected at least 1 of each.")
    accepted = list(inspect.signature(make).parameters)[2:]
    unknown = sorted(set(options or {}) - set(accepted))
    if unknown:
        raise TypeError(
            f"The baseline {name!r} has no option {', '.join(unknown)}. "
            f"It has: {', '.join(accepted) or 'none'}."
        )
    task = Task(
        name=name,
        train=train,
        validation=validation,
        ood=ood,
        members=members,
        seed=seed,
        epochs=epochs,
        learning_rate=learning_rate,
        folder=None if folder is None else Path(folder) / name,
        progress=progress,
    )
    return make(host, task, **(options or {})).eval()
