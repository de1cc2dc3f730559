"""The answers of tasks other than one class per input: the columns and fields that each adds.

Like `prediction`, this module imports neither torch nor anything of a task: columns are tensors or
numpy arrays, and rows are plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .prediction import DECIDED, SURE, Prediction, as_numpy, named


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class MultiLabelPrediction(Prediction):
    """Any number of labels per input, each with its own probability.

    Attributes:
        probabilities: Mean of the members' sigmoids, `[batch, label]`.
        active: Whether a label is predicted, bool `[batch, label]`.
        label_uncertainty: Binary entropy of each label's probability in nats, `[batch, label]`.
        mutual_information: What the members disagree about, summed over labels, `[batch]`.
        disagreement: Share of member pairs and labels in which the decisions differ, `[batch]`.
        member_logits: The members' logits, temperatures applied, `[batch, member, label]`.
        student_logits: The logits of the one output that answers for the ensemble; None without.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "label": "names of the predicted labels; their numbers as text when they have no names",
        "class": "numbers of the predicted labels",
        "confidence": "probabilities of the predicted labels, in their order",
        **SURE,
        "mutual_information": "what the members disagree about, summed over labels, in nats",
        "disagreement": "share of member pairs and labels that are decided differently",
        **DECIDED,
    }

    probabilities: Any
    active: Any
    label_uncertainty: Any
    mutual_information: Any
    disagreement: Any
    member_logits: Any
    student_logits: Any = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, label]`."""
        return self.member_logits

    @property
    def class_index(self) -> list[list[int]]:
        """Numbers of the predicted labels of each input."""
        rows = self.active.tolist()
        return [[label for label, active in enumerate(row) if active] for row in rows]

    @property
    def labels(self) -> list[Any]:
        """Names of the predicted labels of each input; their numbers as text without names."""
        return named(self.class_index, self.class_names)

    @property
    def confidence(self) -> list[list[float]]:
        """Probabilities of the predicted labels of each input."""
        rows = as_numpy(self.probabilities).tolist()
        return [
            [float(f"{row[label]:.7g}") for label in labels]
            for row, labels in zip(rows, self.class_index, strict=True)
        ]

    def _title(self) -> str:
        return f"{super()._title()}, {self.active.shape[-1]} labels"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class RegressionPrediction(Prediction):
    """One or several numbers per input.

    Attributes:
        values: Mean of the members' numbers, `[batch, number]`.
        spread: Standard deviation of the members' numbers, `[batch, number]`; 0 for one member.
        member_values: The members' numbers, `[batch, member, number]`.
        student_values: The numbers of the one output that answers for the ensemble; None without.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "value": "the predicted number; a list of numbers when the model gives several",
        "spread": "standard deviation of the members' numbers, in the same form",
        **SURE,
        **DECIDED,
    }

    values: Any
    spread: Any
    member_values: Any
    student_values: Any = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, number]`."""
        return self.member_values

    @property
    def student_outputs(self) -> Any:
        """What a student gave that answers for the members; None without one."""
        return self.student_values

    def rows(self, *, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary of plain values per input: the keys of `FIELDS`."""
        rows = super().rows()
        for name in ("value", "spread") if self.values.shape[-1] == 1 else ():
            for row in rows:
                (row[name],) = row[name]
        return rows

    def _title(self) -> str:
        count = self.values.shape[-1]
        return f"{super()._title()}, {'1 number' if count == 1 else f'{count} numbers'} each"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class EmbeddingPrediction(Prediction):
    """One vector per input.

    Attributes:
        embedding: Mean of the members' embeddings, `[batch, width]`.
        spread: Standard deviation of the members' embeddings, `[batch, width]`.
        member_embeddings: The members' embeddings, `[batch, member, width]`.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "embedding": "the members' mean vector",
        **SURE,
        **DECIDED,
    }
    HIDDEN: ClassVar[frozenset[str]] = Prediction.HIDDEN | {"embedding"}

    embedding: Any
    spread: Any
    member_embeddings: Any

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, width]`."""
        return self.member_embeddings

    def _title(self) -> str:
        return f"{super()._title()}, {self.embedding.shape[-1]} numbers wide"


TASK_PREDICTIONS: Sequence[type[Prediction]] = (
    MultiLabelPrediction,
    RegressionPrediction,
    EmbeddingPrediction,
)
"""All answers of this module, for the tables of the documentation."""
