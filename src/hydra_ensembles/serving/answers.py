"""What the service says about a batch: columns of numpy arrays, whatever computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

DECISIONS = ("answer", "unsure", "new")
"""Decisions by their number."""
WHY = ("", "too unsure", "too new")
"""Why an answer is withheld, by decision."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to a batch, one row per input.

    Attributes:
        label: Number of the most probable class, int64 `[row]`.
        probabilities: Calibrated, float32 `[row, class]`.
        uncertainty: Higher when less sure, float32 `[row]`.
        mutual_information: What the members disagree about, in nats, float32 `[row]`.
        member_logits: float32 `[row, member, class]`; None when the backend does not tell.
        novelty: Share of known data that is less novel, float32 `[row]`; None when not fitted.
        novelty_score: What novelty ranks, float32 `[row]`; None when not fitted.
        decision: 0 answer, 1 abstain as unsure, 2 abstain as new, int64 `[row]`.
    """

    label: np.ndarray
    probabilities: np.ndarray
    uncertainty: np.ndarray
    mutual_information: np.ndarray
    decision: np.ndarray
    member_logits: np.ndarray | None = None
    novelty: np.ndarray | None = None
    novelty_score: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.label)

    @property
    def probability(self) -> np.ndarray:
        """Probability of the predicted class, `[row]`."""
        return self.probabilities.max(-1)

    @property
    def abstain(self) -> np.ndarray:
        """True where the answer should be withheld, `[row]`."""
        return self.decision != 0

    @property
    def why(self) -> list[str]:
        """Why answers are withheld, `[row]`; the empty word where they are given."""
        return [WHY[code] for code in self.decision.tolist()]

    def finite(self) -> np.ndarray:
        """True where every number of an answer is one, `[row]`."""
        good = np.isfinite(self.probabilities).all(-1) & np.isfinite(self.uncertainty)
        good &= np.isfinite(self.mutual_information)
        for column in (self.novelty, self.novelty_score):
            if column is not None:
                good &= np.isfinite(column)
        if self.member_logits is not None:
            good &= np.isfinite(self.member_logits).all((-2, -1))
        return good

    def take(self, rows: Sequence[int]) -> Answers:
        """Return the answers at these rows."""
        chosen: dict[str, Any] = {n: column[list(rows)] for n, column in self._arrays().items()}
        return replace(self, **chosen)

    def _arrays(self) -> dict[str, np.ndarray]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, np.ndarray)}

    def as_records(self, class_names: Sequence[str] | None, score: str) -> list[dict[str, Any]]:
        """Return one plain object per row, named as `hydra-ensembles predict` names them."""
        records = []
        for row in range(len(self)):
            number = int(self.label[row])
            record: dict[str, Any] = {
                "label": name_of(number, class_names),
                "class": number,
                "probability": round(float(self.probability[row]), 6),
                "uncertainty": float(self.uncertainty[row]),
                "score": score,
                "mutual_information": float(self.mutual_information[row]),
            }
            if self.novelty is not None and self.novelty_score is not None:
                record["novelty"] = round(float(self.novelty[row]), 6)
                record["novelty_score"] = float(self.novelty_score[row])
            code = int(self.decision[row])
            record["decision"] = DECISIONS[code]
            record["abstain"] = code != 0
            record["why"] = WHY[code]
            records.append(record)
        return records


def join(parts: Sequence[Answers]) -> Answers:
    """Join answers of several batches into one, in order."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0]._arrays()
    }
    return replace(parts[0], **columns)


def name_of(number: int, class_names: Sequence[str] | None) -> str:
    """Return what a class is called."""
    return class_names[number] if class_names and number < len(class_names) else str(number)
