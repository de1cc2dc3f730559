"""What the service asks of a model: prepare one input, answer a batch, explain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .answers import Answers

Row = str | Mapping[str, np.ndarray]
"""One input: a text, or named arrays without a batch axis."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the protocol: its name, its datatype (`FP32`, `INT64`, `BYTES` ...) and shape.

    Attributes:
        shape: Sizes, the batch first; -1 where any size will do.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_record(self) -> dict[str, Any]:
        """Return it as the protocol writes it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class KnownScores(Protocol):
    """A test for drift: `hydra_ensembles.Drift`, or one that answers alike."""

    windows: list[Any]

    def add_scores(self, scores: Any) -> bool:
        """Add novelty scores; return whether a window that they fill has drifted."""
        ...


class Backend(Protocol):
    """A loaded model.

    `prepare` is called from several threads, everything else from one.

    Attributes:
        platform: What runs it, as `/v2/models/<m>` tells.
        reads: `image` or `text`.
        tensors: The inputs that it takes already prepared.
        classes: How many classes it knows.
        members: How many members it has.
        class_names: By class number, or None.
        score: Name of the uncertainty.
        has_novelty: Whether it says how new an input is.
        alarm: Novelty above 1 - alarm is an alarm.
        rule: When it abstains, in words.
    """

    platform: str
    reads: str
    tensors: tuple[TensorSpec, ...]
    classes: int
    members: int
    class_names: Sequence[str] | None
    score: str
    has_novelty: bool
    alarm: float
    rule: str

    def prepare(self, picture: Any) -> Row:
        """Turn a PIL image into a row."""
        ...

    def predict(self, rows: Sequence[Row]) -> Answers:
        """Answer rows of one kind (texts, or arrays of equal names and shapes)."""
        ...

    def explain(self, row: Row) -> dict[str, Any] | None:
        """Say what speaks for a row's novelty; None when nothing was kept to tell it by."""
        ...

    def drift(self, window: int) -> KnownScores | None:
        """Return a test of the stream by windows of novelty scores; None without novelty."""
        ...
