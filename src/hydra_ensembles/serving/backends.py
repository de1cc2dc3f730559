"""What the service asks of a model, and an exported ensemble that answers it, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..prediction import ClassPrediction, Prediction
from ..prediction_sets import Sets
from ..runtime import ExportedEnsemble
from ..runtime.exported_ensemble import PREDICTIONS
from ..task_predictions import (
    EmbeddingPrediction,
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)
from .batch_queue import Row, stacked, texts_of

if TYPE_CHECKING:
    from ..uncertainty import Drift

ASKS = {"text": ("text", "text_pair"), "question": ("question", "context")}
"""Names of the texts of an input, by what a model is asked; a text may stand for itself."""

ALARM = 0.05
"""False-alarm rate of a model without a policy."""

DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the protocol: its name, its datatype (`FP32`, `INT64`, `BYTES` ...) and shape.

    Attributes:
        shape: Sizes, the batch first; -1 where any size will do.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = (-1,)

    def as_record(self) -> dict[str, Any]:
        """Return it as the protocol writes it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


def rule_in_words(*, sureness: bool, alarm: float | None, guarantees: Sequence[str] = ()) -> str:
    """Say when a model answers, for those who do not know its scores.

    Args:
        sureness: Whether the model must be sure enough.
        alarm: Share of known data that is called new; None where novelty is not asked.
        guarantees: What is guaranteed, as ends of a sentence.
    """
    if not sureness and alarm is None:
        return "It answers every input."
    needs = ["it is sure enough"] * sureness
    if alarm is not None:
        needs.append(f"the input is not newer than {100 * (1 - alarm):.3g} % of what it knows")
    rule = f"It answers when {' and '.join(needs)}."
    if not guarantees:
        return rule
    kept = " and ".join(guarantees)
    return f"{rule} Of inputs like those that it was fitted on, {kept}, on average."


class Backend:
    """A loaded model.

    `prepare` is called from several threads, everything else from one.

    Attributes:
        platform: What runs it, as `/v2/models/<m>` says.
        reads: `image` or `text`.
        asks: What a model of texts is asked: `text` (one answer each), `tokens` or `question`.
        kind: Class of the answers.
        tensors: The inputs that it takes already prepared.
        classes: Number of classes, labels or numbers, or the width of the vectors.
        members: Number of members.
        class_names: By class number, or None.
        score: Name of the uncertainty.
        has_novelty: Whether predictions have novelty.
        has_policy: Whether predictions have decisions.
        alarm: Novelty above 1 - alarm is an alarm.
        rule: When it abstains, with its thresholds.
        rule_in_words: The same for those who do not know the scores.
        sets: What makes the sets with a guarantee; None without.
        example: A text to try; None where there is none.
    """

    platform: str
    reads: str
    asks: str
    kind: type[Prediction]
    tensors: tuple[TensorSpec, ...]
    classes: int
    members: int
    class_names: Sequence[str] | None
    score: str
    has_novelty: bool
    has_policy: bool
    alarm: float
    rule: str
    rule_in_words: str
    sets: Sets | None = None
    example: str | None = None

    @property
    def gives(self) -> str:
        """What an answer is, in words: `4 classes`."""
        if issubclass(self.kind, SpanPrediction):
            return "answers to questions"
        words = {
            MultiLabelPrediction: "label",
            RegressionPrediction: "number",
            TokenPrediction: "tag",
            EmbeddingPrediction: "embedding value",
        }
        word = words.get(self.kind, "class")
        plural = {"class": "classes"}.get(word, f"{word}s")
        return f"{self.classes} {word if self.classes == 1 else plural}"

    def prepare(self, image: Any) -> Row:
        """Turn a PIL image into a row."""
        raise NotImplementedError

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """Predict rows of one kind (texts, or arrays of equal names and shapes); numpy columns."""
        raise NotImplementedError

    def explain(self, row: Row) -> dict[str, Any] | None:
        """Return the evidence for a row's novelty; None when the model keeps none."""
        return None

    def drift(self, window: int) -> Drift | None:
        """Return a test of the stream by windows of novelty scores; None without novelty."""
        return None


class ExportedBackend(Backend):
    """Predict with what `ensemble.export` wrote, by the policy in its contract.

    An export keeps neither the known examples nor their scores: there is no evidence and no test
    for drift.

    Args:
        exported: What `hydra_ensembles.runtime.load` returned.
        class_names: By class number; by default those of the contract.
    """

    platform = "hydra_ensembles_onnx"

    def __init__(
        self, exported: ExportedEnsemble, *, class_names: Sequence[str] | None = None
    ) -> None:
        data = exported.contract.data
        if data["preprocessing"] is None:
            raise DataError(
                "This folder was exported without preprocessing, so the service could read "
                "neither images nor texts. Export it again with a transform or a tokenizer."
            )
        self.exported = exported
        self.reads = str(data["preprocessing"]["kind"])
        self.asks = str(data["preprocessing"].get("reads", "text"))
        self.kind = PREDICTIONS.get(exported.task, ClassPrediction)
        self.tensors = tuple(
            TensorSpec(
                port["name"],
                DATATYPES[port["dtype"]],
                tuple(side if isinstance(side, int) else -1 for side in port["shape"]),
            )
            for port in exported.contract.inputs
        )
        self.classes, self.members = int(data["classes"]), int(data["members"])
        self.class_names = class_names or exported.class_names
        self.score = str(data["score"])
        self.has_novelty = "novelty" in {port["name"] for port in exported.contract.outputs}
        policy = exported.contract.policy(exported.program)
        self.has_policy = exported.has_policy
        self.alarm = float(policy["alarm"] or ALARM)
        self.rule = str(policy["words"])
        self.sets = exported.sets
        self.rule_in_words = rule_in_words(
            sureness=policy["uncertainty_above"] is not None, alarm=policy["alarm"]
        )

    def prepare(self, image: Any) -> Row:
        """Turn a PIL image into a row, by the exported preprocessing."""
        return {name: array[0] for name, array in self.exported.prepare([image]).items()}

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """Predict rows of one kind."""
        if texts_of(rows[0]):
            arrays = self.exported.prepare(list(rows))
        else:
            arrays = stacked(rows)
        return replace(self.exported.answer(arrays), class_names=self.class_names)
