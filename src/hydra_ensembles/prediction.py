"""The answer: one record for every way to get one, and the only place that names its fields.

Columns are torch tensors (`HydraEnsemble.predict`) or numpy arrays (`hydra_ensembles.runtime`).
Importing this module does not import torch. The command line, the service, Parquet, map functions,
data frames and pipelines format what `rows` returns and add nothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from ._tables import table
from .registry import imported

DECISIONS = ("answer", "unsure", "new", "new")
"""Decisions by their code; 3 is both unsure and new, which is decided as new."""
WHY = (None, "too unsure", "too new", "too unsure and too new")
"""Why an input is not answered, by the same code."""
ANSWER, UNSURE, NEW, BOTH = range(4)

SURE = {"uncertainty": "the ensemble's score, higher when less sure"}
MEMBERS = {
    "mutual_information": "what the members disagree about, in nats",
    "disagreement": "share of member pairs that predict different classes",
}
DECIDED = {
    "novelty": "share of the known data that is less novel; null when novelty is not fitted",
    "novelty_score": "the unbounded score that novelty ranks; null when novelty is not fitted",
    "decision": '"answer", "unsure" or "new"; null without a policy',
    "why": "why the input is not answered; null when it is, and without a policy",
}
SET = "with a guarantee unless the decision is new; null before fit_sets"
FIELDS = {
    "label": "name of the predicted class; its number as text when the classes have no names",
    "class": "number of the predicted class",
    "confidence": "probability of the predicted class",
    **SURE,
    **MEMBERS,
    **DECIDED,
    "set": f"names of the classes that may be right, the most probable first, {SET}",
}
"""The fields of a row of a classifier, in order, and what they mean."""

_COLUMNS = {"label": "labels", "class": "class_index", "value": "values"}
"""Attributes whose field has another name."""


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Prediction:
    """An ensemble's answer to a batch, and how sure it is; each task adds its own columns.

    Attributes:
        uncertainty: The score named by `score`, higher when less sure, `[batch]`.
        score: Name of the score behind `uncertainty`.
        novelty: Share of known data that is less novel, in [0, 1], `[batch]`: above 0.95 for 5 % of
            data like the known data. None before `fit_novelty_`.
        novelty_score: The unbounded score that `novelty` ranks, `[batch]`; None before
            `fit_novelty_`.
        code: The decision as a number, int64 `[batch]`: 0 answer, 1 unsure, 2 new, 3 unsure and
            new; None without a policy.
        class_names: Names of the classes, labels or numbers, in their order; or None.
        sets: The rule behind `set` (`Sets`); None before `fit_sets`.
        group: The group of each input as a number of `sets.groups`, `[batch]` (see `in_groups`).
    """

    FIELDS: ClassVar[Mapping[str, str]] = {**SURE, **DECIDED}
    """The fields of a row, in order, and what they mean."""
    HIDDEN: ClassVar[frozenset[str]] = frozenset({"class", "novelty_score", "why"})
    """Fields that printing leaves out."""
    LISTS: ClassVar[tuple[str, ...]] = ()
    """Columns that are lists, one entry per input, or None."""

    uncertainty: Any
    score: str = "msp"
    novelty: Any = None
    novelty_score: Any = None
    code: Any = None
    class_names: Sequence[str] | None = None
    sets: Any = None
    group: Any = None

    def __getattr__(self, name: str) -> Any:
        """Say what an answer of this task has instead of an attribute of another task's."""
        has = ", ".join(f.name for f in fields(self))
        raise AttributeError(f"{type(self).__name__} has no {name!r}. It has {has}.")

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, ...]`."""
        raise NotImplementedError

    @property
    def student_outputs(self) -> Any:
        """What a student gave that answers for the members, `[batch, ...]`; None without one."""
        return getattr(self, "student_logits", None)

    @property
    def answering_outputs(self) -> Any:
        """Outputs behind the answer, `[batch, member, ...]`; a student is one member."""
        student = self.student_outputs
        return self.member_outputs if student is None else student[:, None]

    @property
    def decision(self) -> list[Any] | None:
        """The decisions, "answer", "unsure" or "new", `[batch]`; None without a policy."""
        return None if self.code is None else _each(DECISIONS.__getitem__, self.code.tolist())

    @property
    def why(self) -> list[Any] | None:
        """Why inputs are not answered, `[batch]`; None where they are, and without a policy."""
        return None if self.code is None else _each(WHY.__getitem__, self.code.tolist())

    @property
    def abstain(self) -> Any:
        """True where the policy does not answer, `[batch]`; None without a policy."""
        return None if self.code is None else self.code != ANSWER

    @property
    def set(self) -> list[Any] | None:
        """What may be right, for each input as rows hold it; None before `fit_sets`.

        The guarantee is for data like the held-out examples: not where the decision is new.
        """
        return None if self.sets is None else self.sets.of(self)

    def in_groups(self, names: Sequence[Any]) -> Prediction:
        """Return the answer with each input's group, for sets by group.

        Without groups, and for one that had no held-out example, the largest sets are given.
        """
        codes = [] if self.sets is None else self.sets.codes(names)
        if len(codes) != len(self):
            raise ValueError(
                f"{len(names)} groups for {len(self)} inputs"
                + ("; there are no sets: call fit_sets() first." if self.sets is None else ".")
            )
        like = self.uncertainty
        column = like.new_tensor(codes).long() if hasattr(like, "new_tensor") else np.array(codes)
        return replace(self, group=column)

    @property
    def finite(self) -> Any:
        """True where every number of the answer is finite, `[batch]`."""
        finite = True
        for column in filter(_is_float, self._columns().values()):
            good = abs(column) < float("inf")  # false for NaN
            finite = good.reshape(len(self), -1).all(1) & finite
        return finite

    def rows(self, *, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary of plain values per input: the keys of `FIELDS`, null when absent.

        Args:
            probabilities: Whether to add the probabilities of all classes, where the task has any.
        """
        here = self.cpu()  # one copy from a device
        names = [*self.FIELDS, *["probabilities"] * (probabilities and "probabilities" in self)]
        columns = {name: _plain(getattr(here, _COLUMNS.get(name, name))) for name in names}
        return [
            {name: None if column is None else column[i] for name, column in columns.items()}
            for i in range(len(self))
        ]

    def to_pandas(self) -> Any:
        """Return the rows as a data frame."""
        pandas = imported("pandas", "to_pandas()", "data")
        return pandas.DataFrame(self.rows(), columns=list(self.FIELDS))

    def to_numpy(self) -> Prediction:
        """Return the prediction with numpy columns; half precision becomes float32."""
        return self.cpu()._map(as_numpy)

    def to(self, device: Any) -> Prediction:
        """Return the prediction on another device."""
        return self._map(lambda column: column.to(device))

    def cpu(self) -> Prediction:
        """Return the prediction on the CPU."""
        return replace(self, **_on_host(self._columns()))

    def __len__(self) -> int:
        return len(self.uncertainty)

    def __contains__(self, name: str) -> bool:
        """Tell whether the answer has a column of this name."""
        return any(f.name == name for f in fields(self))

    def __getitem__(self, index: Any) -> Prediction:
        """Return the chosen inputs; a single number keeps the batch axis, with one input."""
        if isinstance(index, int):
            length = len(self)
            if not -length <= index < length:
                raise IndexError(f"Input {index} of a prediction on {length}.")
            index = slice(index % length, index % length + 1)
        taken = self._map(lambda column: column[index])
        lists = {name: getattr(self, name) for name in self.LISTS}
        rows = np.arange(len(self))[index if isinstance(index, slice) else as_numpy(index)]
        found: dict[str, Any] = {
            name: [values[row] for row in rows] for name, values in lists.items() if values
        }
        return replace(taken, **found) if found else taken

    def __iter__(self) -> Iterator[Prediction]:
        return (self[i] for i in range(len(self)))

    def _columns(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: v for name, v in values.items() if hasattr(v, "ndim")}

    def _map(self, function: Callable[[Any], Any]) -> Prediction:
        return replace(self, **{name: function(column) for name, column in self._columns().items()})

    def _title(self) -> str:
        inputs, members, *_ = self.member_outputs.shape
        of = "1 member" if members == 1 else f"{members} members"
        return f"Prediction of {of} on {'1 input' if inputs == 1 else f'{inputs} inputs'}"

    def _shown(self, most: int) -> tuple[list[str], list[list[str]], str]:
        """Return headings, rows and a note: what is printed of the first inputs."""
        if self.uncertainty.ndim > 1 or not len(self):
            return [], [], ""
        rows = self[:most].rows()
        names = [n for n in self.FIELDS if n not in self.HIDDEN and rows[0][n] is not None]
        texts = [
            [
                f"{v:.4g}" if isinstance(v, float) else _short(v) if n == "set" else str(v)
                for n, v in ((n, row[n]) for n in names)
            ]
            for row in rows
        ]
        headings = [f"uncertainty ({self.score})" if n == "uncertainty" else n for n in names]
        note = f"... and {len(self) - most} more" if len(self) > most else ""
        if self.sets is not None and "new" in (self.decision or ()):
            note = "; ".join(filter(None, [note, "sets of new inputs have no guarantee"]))
        return [heading.replace("_", " ") for heading in headings], texts, note

    def _repr_html_(self) -> str:
        headings, rows, note = self._shown(20)
        numbered = [[str(i), *row] for i, row in enumerate(rows)]
        return table(self._title(), ["", *headings] if headings else [], numbered, note=note)

    def __repr__(self) -> str:
        headings, rows, note = self._shown(8)
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
            for row in ([headings, *rows] if headings else [])
        ]
        return "\n".join([self._title(), *lines, *([f"  {note}"] if note else [])])


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class ClassPrediction(Prediction):
    """The answer of a classifier: one class per input.

    A token classifier answers for every token: `[batch, token]` instead of `[batch]`, and member
    logits `[batch, member, token, class]`. Padding is answered too and has no meaning.

    Attributes:
        probabilities: Mean of the members' softmax, `[batch, class]`; with a student, its softmax.
        class_index: The most probable class, the lower one on a tie, int64 `[batch]`.
        mutual_information: H(mean p) - mean H(p) in nats, `[batch]`.
        disagreement: Share of member pairs with different classes, `[batch]`.
        member_logits: The members' logits, temperatures applied, `[batch, member, class]`: behind
            `mutual_information` and `disagreement`, and without a student behind all else.
        student_logits: The logits of the one output that answers for the ensemble, temperature
            applied, `[batch, class]`; None without a student.

    Example:
        >>> answer = ensemble.predict(batch)
        >>> answer.labels, answer.decision
        (['cat', 'dog'], ['answer', 'new'])
        >>> answer.rows()[0]["confidence"]
        0.98
    """

    FIELDS: ClassVar[Mapping[str, str]] = FIELDS

    probabilities: Any
    class_index: Any
    mutual_information: Any
    disagreement: Any
    member_logits: Any
    student_logits: Any = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, ...]`."""
        return self.member_logits

    @property
    def confidence(self) -> Any:
        """Probability of the predicted class, `[batch]`."""
        best = self.probabilities.max(-1)
        return best if isinstance(best, np.ndarray) else best.values

    @property
    def logits(self) -> Any:
        """Log of the probabilities, `[batch, class]`, stable: their softmax is `probabilities`."""
        logits = self.answering_logits
        if isinstance(logits, np.ndarray):
            shifted = logits - logits.max(-1, keepdims=True)
            logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            return np.logaddexp.reduce(logs, axis=1) - np.log(logits.shape[1])
        return logits.log_softmax(-1).logsumexp(1) - np.log(logits.shape[1])

    @property
    def answering_logits(self) -> Any:
        """Logits behind the probabilities, `[batch, member, class]`; a student is one member."""
        return self.answering_outputs

    @property
    def labels(self) -> list[Any]:
        """Names of the predicted classes, `[batch]`; their numbers as text without names."""
        return named(self.class_index.tolist(), self.class_names)

    def _title(self) -> str:
        *tokens, classes = self.member_logits.shape[2:]
        per_token = f", for each of {tokens[0]} tokens" if tokens else ""
        by = "" if self.student_logits is None else ", answered by a student"
        return f"{super()._title()}, {classes} classes{per_token}{by}"


def join(parts: Sequence[Prediction]) -> Prediction:
    """Join the predictions of several batches, in order; a column that some lack is None."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for name, first in parts[0]._columns().items():
        columns = [getattr(part, name) for part in parts]
        if any(column is None for column in columns):
            joined[name] = None
            continue
        columns = _even(columns)
        if isinstance(first, np.ndarray):
            joined[name] = np.concatenate(columns)
        else:
            import torch

            joined[name] = torch.cat(columns)
    for name in parts[0].LISTS:
        lists = [getattr(part, name) for part in parts]
        joined[name] = None if None in lists else [item for part in lists for item in part]
    return replace(parts[0], **joined)


def _even(columns: list[Any]) -> list[Any]:
    """Pad columns of texts with different numbers of tokens to one number, with zeros."""
    shape = [max(sizes) for sizes in zip(*(column.shape[1:] for column in columns), strict=True)]
    if all(list(column.shape[1:]) == shape for column in columns):
        return columns
    padded = []
    for column in columns:
        new = (np.zeros if isinstance(column, np.ndarray) else column.new_zeros)(
            (len(column), *shape), dtype=column.dtype
        )
        new[tuple(slice(size) for size in column.shape)] = column
        padded.append(new)
    return padded


def named(numbers: list[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the names of nested numbers of classes; the numbers as text without names."""
    known = names or ()
    return _each(lambda i: known[i] if i < len(known) else str(i), numbers)


def _each(function: Callable[[int], Any], numbers: list[Any]) -> list[Any]:
    """Apply a function to every number of nested lists."""
    return [_each(function, n) if isinstance(n, list) else function(n) for n in numbers]


def _short(value: list[Any]) -> str:
    """Return a set in few letters, for a table: its first entries."""
    shown = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in value[:4]]
    return f"[{', '.join([*shown, *['...'] * (len(value) > 4)])}]"


def _plain(column: Any) -> list[Any] | None:
    """Return a column as plain numbers: floats with the digits that float32 has, or None."""
    if column is None or isinstance(column, list):
        return column
    values = as_numpy(column)
    if values.dtype.kind == "f":
        return _each(lambda value: float(f"{value:.7g}"), values.tolist())
    return values.tolist()


def _on_host(columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns on the CPU, in one copy from a device: every copy waits for all its work."""
    away = {n: c for n, c in columns.items() if getattr(c, "is_cpu", True) is False}
    if not away:
        return columns
    import torch

    # the widest numbers first, so that all are aligned
    away = dict(sorted(away.items(), key=lambda column: -column[1].element_size()))
    parts = [column.detach().contiguous().flatten().view(torch.uint8) for column in away.values()]
    joined = torch.cat(parts).cpu().split([len(part) for part in parts])
    found = {
        name: part.view(column.dtype).view(column.shape)
        for (name, column), part in zip(away.items(), joined, strict=True)
    }
    return {**columns, **found}


def _is_float(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return column.dtype.kind == "f"
    return bool(column.is_floating_point())


def as_numpy(column: Any) -> np.ndarray[Any, Any]:
    """Return a column as an array; half precision becomes float32."""
    if not hasattr(column, "detach"):
        return np.asarray(column)
    column = column.detach().cpu()
    return (column.float() if column.is_floating_point() else column).numpy()
