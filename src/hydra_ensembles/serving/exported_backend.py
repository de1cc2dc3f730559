"""An exported ensemble as a backend, run by ONNX Runtime without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DataError, UnsupportedModelError
from ..runtime import ExportedEnsemble
from .answers import Answers
from .backend import KnownScores, Row, TensorSpec

ALARM = 0.05
DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}


class ExportedBackend:
    """Answer with what `ensemble.export` wrote, by the rule in its contract.

    It keeps neither the known examples nor their scores: nothing is said about the nearest known
    examples, and drift is not tested.

    Args:
        exported: What `hydra_ensembles.runtime.load` returned.
        class_names: By class number; by default those of the contract.
    """

    platform = "hydra_ensembles_onnx"

    def __init__(
        self, exported: ExportedEnsemble, *, class_names: Sequence[str] | None = None
    ) -> None:
        data = exported.contract.data
        if exported.task not in ("image-classification", "text-classification"):
            raise UnsupportedModelError(
                f"The exported ensemble does {exported.task}; the service answers pictures and "
                "texts, once each."
            )
        if data["preprocessing"] is None:
            raise DataError(
                "This folder was exported without preprocessing, so that nobody could send it a "
                "picture or a text. Export it again with a transform or a tokenizer."
            )
        self.exported = exported
        self.reads = exported.task.partition("-")[0]
        self.tensors = tuple(
            TensorSpec(
                port["name"],
                DATATYPES[port["dtype"]],
                tuple(side if isinstance(side, int) else -1 for side in port["shape"]),
            )
            for port in exported.contract.inputs
        )
        self.classes, self.members = int(data["classes"]), int(data["members"])
        self.class_names: Sequence[str] | None = class_names or exported.class_names
        self.score = str(data["score"])
        outputs = {port["name"] for port in exported.contract.outputs}
        self.has_novelty = "novelty" in outputs
        policy = exported.contract.policy(exported.program)
        self.alarm = float(policy["alarm"] or ALARM)
        self.rule = str(policy["words"])

    def prepare(self, picture: Any) -> Row:
        """Turn a PIL image into a row, by the exported preprocessing."""
        return {name: array[0] for name, array in self.exported.prepare([picture]).items()}

    def predict(self, rows: Sequence[Row]) -> Answers:
        """Answer rows of one kind."""
        if isinstance(rows[0], str):
            arrays = self.exported.prepare(list(rows))
        else:
            arrays = {
                name: np.stack([row[name] for row in rows if not isinstance(row, str)])
                for name in rows[0]
            }
        outputs = self.exported.run(arrays)
        return Answers(
            label=outputs["class"],
            decision=np.minimum(outputs["decision"], 2),  # 3 is unsure and new
            probabilities=outputs["probabilities"],
            uncertainty=outputs["uncertainty"],
            mutual_information=outputs["mutual_information"],
            member_logits=outputs["member_logits"],
            novelty=outputs.get("novelty"),
            novelty_score=outputs.get("novelty_score"),
        )

    def explain(self, row: Row) -> dict[str, Any] | None:
        """Return None: no known example is exported."""
        return None

    def drift(self, window: int) -> KnownScores | None:
        """Return None: the scores of the known data are not exported."""
        return None
