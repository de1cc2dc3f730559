"""What an exported ensemble answers, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

DECISIONS = ("answer", "unsure", "new")
"""Decisions by their number."""


@dataclass(frozen=True, repr=False, eq=False)
class Answer:
    """What an exported ensemble says about a batch: `Prediction` without torch.

    A token classifier answers for every token: `[batch, token]` in the place of `[batch]`.

    Attributes:
        label: The most probable class, `[batch]`.
        probabilities: Mean of the members' softmax, `[batch, class]`.
        uncertainty: The contract's `score`, higher when less sure, `[batch]`.
        mutual_information: How far the members disagree, in nats, `[batch]`.
        decision: 0 answer, 1 abstain as unsure, 2 abstain as new, `[batch]`.
        abstain: True where the decision is not to answer, `[batch]`.
        member_logits: Temperatures applied, `[batch, member, class]`.
        novelty: Share of known data that is less novel, `[batch]`; None when it was not fitted.
        novelty_score: What `novelty` ranks, `[batch]`; None when it was not fitted.
        class_names: Names of the classes by number, or None.
    """

    label: np.ndarray
    probabilities: np.ndarray
    uncertainty: np.ndarray
    mutual_information: np.ndarray
    decision: np.ndarray
    abstain: np.ndarray
    member_logits: np.ndarray
    novelty: np.ndarray | None = None
    novelty_score: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, outputs: Mapping[str, np.ndarray], class_names: tuple[str, ...] | None = None
    ) -> Answer:
        """Make an answer of a program's outputs."""
        values = {k: v for k, v in outputs.items() if k not in ("class", "decision")}
        decision = np.minimum(outputs["decision"], len(DECISIONS) - 1)  # 3 is unsure and new
        return cls(
            label=outputs["class"],
            decision=decision,
            abstain=decision != 0,
            class_names=class_names,
            **values,
        )

    @property
    def confidence(self) -> np.ndarray:
        """Probability of the predicted class, `[batch]`."""
        return self.probabilities.max(-1)

    @property
    def names(self) -> list[Any] | None:
        """Names of the predicted classes, or None when the classes have none."""
        if self.class_names is None:
            return None
        return np.array(self.class_names, dtype=object)[self.label].tolist()

    @property
    def decisions(self) -> list[Any]:
        """The decisions in words: "answer", "unsure" or "new"."""
        return np.array(DECISIONS, dtype=object)[self.decision].tolist()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: Any) -> Answer:
        """Return the chosen examples; a single number keeps the batch axis, with one example."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"Example {index} of an answer on {len(self)}.")
            index = slice(index % len(self), index % len(self) + 1)
        chosen = {name: value[index] for name, value in self.arrays().items()}
        return Answer(**chosen, class_names=self.class_names)

    def __iter__(self) -> Iterator[Answer]:
        return (self[i] for i in range(len(self)))

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per example, of plain numbers and lists as JSON has them."""
        arrays = {name: value.tolist() for name, value in self.arrays().items()}
        names = self.names
        if names is not None:
            arrays["name"] = names
        return [{name: values[i] for name, values in arrays.items()} for i in range(len(self))]

    def __repr__(self) -> str:
        examples = "1 example" if len(self) == 1 else f"{len(self)} examples"
        head = f"Answer on {examples}, {self.probabilities.shape[-1]} classes"
        if self.label.ndim > 1:
            return f"{head}, for each of {self.label.shape[1]} tokens"
        names = self.names or self.label.tolist()
        lines = [head]
        for i in range(min(len(self), 8)):
            new = "" if self.novelty is None else f"  novelty {self.novelty[i]:.3f}"
            quiet = f"  {DECISIONS[self.decision[i]]}" if self.abstain[i] else ""
            lines.append(
                f"  {names[i]}  p {self.confidence[i]:.3f}  uncertainty {self.uncertainty[i]:.4g}"
                f"{new}{quiet}"
            )
        return "\n".join([*lines, *([f"  ... and {len(self) - 8} more"] if len(self) > 8 else [])])
