"""A saved ensemble as a backend, run by torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.image_data import image_batch
from ..errors import DataError, UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.inputs import image_key, prepare
from ..uncertainty import Drift, Policy
from .answers import Answers
from .backend import Row, TensorSpec

ALARM = 0.05


class TorchBackend:
    """Answer with a `HydraEnsemble`, by its own temperatures, transform or tokenizer.

    It abstains by the ensemble's policy; without one, at the alarm level, if it has novelty.

    Args:
        ensemble: With its `transform` or `tokenizer` set.
        class_names: By class number; by default the ensemble's own.
        alarm: Abstain when newer than all but this share of known data, in place of the policy.
    """

    platform = "hydra_ensembles_torch"

    def __init__(
        self,
        ensemble: HydraEnsemble,
        *,
        class_names: Sequence[str] | None = None,
        alarm: float | None = None,
    ) -> None:
        if ensemble.tokenizer is None and ensemble.transform is None:
            raise DataError(
                "This ensemble was saved without a transform or tokenizer, so that nobody could "
                "send it a picture or a text. Set ensemble.transform or ensemble.tokenizer and "
                "save it again."
            )
        if alarm is not None and not 0 < alarm < 1:
            raise ValueError(f"alarm={alarm}: expected a number between 0 and 1, such as 0.05.")
        if alarm is not None and ensemble.novelty is None:
            raise DataError(
                "An alarm level needs a model that knows its data: call "
                "ensemble.fit_novelty_(known) and save it again."
            )
        self.ensemble = ensemble.eval()
        self.reads = "image" if ensemble.tokenizer is None else "text"
        names = (ensemble.id2label or {}).values()
        self.class_names: Sequence[str] | None = list(class_names or names) or None
        self.score = ensemble.score
        self.has_novelty = ensemble.novelty is not None
        self._policy = self._choose_policy(alarm)
        self.alarm, self.rule = self._policy.alarm or ALARM, str(self._policy)
        self.tensors = self._tensors()
        example = self.ensemble.predict(self._batch([self._example()]))  # the first call is slow
        if example.member_logits.ndim != 3:
            raise UnsupportedModelError(
                "This ensemble answers for every token; the service answers once per text."
            )
        self.members, self.classes = example.member_logits.shape[1:]

    def _choose_policy(self, alarm: float | None) -> Policy:
        kept, novelty = self.ensemble.policy, self.ensemble.novelty
        if kept is not None and alarm is None:
            return kept
        if novelty is None:
            return Policy(score=self.score)
        level = ALARM if alarm is None else alarm
        return Policy(novelty_threshold=novelty.threshold(level), alarm=level, score=self.score)

    def _tensors(self) -> tuple[TensorSpec, ...]:
        if self.reads == "text":
            keys = [key for key in self._example_tokens() if key != "labels"]
            return tuple(TensorSpec(key, "INT64", (-1, -1)) for key in keys)
        shape = _arrays(self._example())["pixel_values"].shape
        return (TensorSpec("pixel_values", "FP32", (-1, *shape)),)

    def _example(self) -> Row:
        if self.reads == "text":
            return "example"
        from PIL import Image

        return self.prepare(Image.new("RGB", (64, 64), (127, 127, 127)))

    def _example_tokens(self) -> dict[str, Any]:
        tokens = prepare(self.ensemble, ["example"])
        host = getattr(self.ensemble.host, "forward", self.ensemble.host)
        known = inspect.signature(host).parameters
        return {key: value for key, value in tokens.items() if key in known}

    def prepare(self, picture: Any) -> Row:
        """Turn a PIL image into a row, by the ensemble's own transform."""
        transform = self.ensemble.transform
        if transform is None:
            raise DataError("This model reads texts, not pictures.")
        return {"pixel_values": transform(picture).numpy()}

    def predict(self, rows: Sequence[Row]) -> Answers:
        """Answer rows of one kind."""
        prediction = self.ensemble.predict(self._batch(rows)).cpu()
        columns = {
            name: _float32(getattr(prediction, name))
            for name in (
                *("probabilities", "uncertainty", "mutual_information", "member_logits"),
                *("novelty", "novelty_score"),
            )
        }
        decision = self._policy.decide(prediction.uncertainty, prediction.novelty_score)
        return Answers(label=prediction.class_index.numpy(), decision=decision.numpy(), **columns)

    def _batch(self, rows: Sequence[Row]) -> Any:
        if isinstance(rows[0], str):
            return prepare(self.ensemble, list(rows))
        columns: dict[str, torch.Tensor] = {
            name: torch.from_numpy(np.stack([_arrays(row)[name] for row in rows]))
            for name in rows[0]
        }
        if self.reads == "text":
            return columns
        images = columns["pixel_values"].to(self.ensemble.dtype)
        return image_batch(images, None, image_key(self.ensemble))

    def explain(self, row: Row) -> dict[str, Any] | None:
        """Say which terms and which known examples speak for a row's novelty."""
        if not self.has_novelty:
            return None
        evidence = self.ensemble.why_novel(self._batch([row]))
        near = zip(evidence.neighbours[0].tolist(), evidence.similarity[0].tolist(), strict=True)
        return {
            "terms": [{"term": term, "p": p} for term, p in evidence.strongest(0)],
            "nearest": [
                {
                    "position": position,
                    "name": evidence.names[position] if evidence.names else None,
                    "similarity": round(close, 4),
                }
                for position, close in near
            ],
        }

    def drift(self, window: int) -> Drift | None:
        """Return a test of the stream against the known data."""
        return Drift(self.ensemble, window=window) if self.has_novelty else None


def _float32(column: torch.Tensor | None) -> Any:
    return None if column is None else column.float().numpy()


def _arrays(row: Row) -> Mapping[str, np.ndarray]:
    if isinstance(row, str):
        raise DataError("A batch holds texts and tensors; expected one kind.")
    return row
