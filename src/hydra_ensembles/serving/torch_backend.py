"""A saved ensemble as a backend, run by torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.eval_mode import twin
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.inputs import image_key, prepare
from ..prediction import Prediction
from ..uncertainty import Drift, Policy
from ..uncertainty.policy import GIVEN
from .backends import ALARM, Backend, TensorSpec, rule_in_words
from .batch_queue import Row, stacked, texts_of


class TorchBackend(Backend):
    """Predict with a `HydraEnsemble`, by its own temperatures, transform or tokenizer.

    It decides by the ensemble's policy; without one, by an alarm level, if it has novelty. The
    ensemble is not changed.

    Args:
        ensemble: With its `transform` or `tokenizer` set.
        class_names: By class number; by default the ensemble's own.
        alarm: False-alarm rate on known data, instead of the policy.
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
                "This ensemble was saved without a transform or tokenizer, so the service could "
                "read neither images nor texts. Set ensemble.transform or ensemble.tokenizer and "
                "save it again."
            )
        if alarm is not None and not 0 < alarm < 1:
            raise ValueError(f"alarm={alarm}: expected a number between 0 and 1, such as 0.05.")
        if alarm is not None and ensemble.novelty is None:
            raise DataError(
                "An alarm level needs novelty: call ensemble.fit_novelty_(known) and save it again."
            )
        self.ensemble = ensemble = twin(ensemble).eval()
        if ensemble.novelty is not None and (alarm is not None or ensemble.policy is None):
            level = ALARM if alarm is None else alarm
            newest = ensemble.novelty.threshold(level)
            ensemble.policy = Policy(novelty_threshold=newest, alarm=level, score=ensemble.score)
        policy = ensemble.policy
        self.reads = "image" if ensemble.tokenizer is None else "text"
        names = (ensemble.id2label or {}).values()
        self.class_names = list(class_names or names) or None
        self.score = ensemble.score
        self._transform, self._dtype = ensemble.transform, ensemble.dtype
        self._key = image_key(ensemble)
        self.has_novelty, self.has_policy = ensemble.novelty is not None, policy is not None
        self.alarm = (policy.alarm if policy else None) or ALARM
        self.rule = "always answer" if policy is None else str(policy)
        self.rule_in_words = _in_words(policy or Policy())
        self.sets = ensemble.sets
        task = ensemble.task
        self.kind = task.prediction
        asked = "answer" in self.kind.FIELDS
        self.asks = "question" if asked else "tokens" if task.by_token else "text"
        if self.reads == "text" and ensemble.novelty is not None and not asked:
            whole = (name for name in ensemble.novelty.names if name and not name.endswith("…"))
            self.example = next(whole, None)
        if self.reads == "text":
            example: Row = {"question": "example", "context": "example"} if asked else "example"
            batch = self._batch([example])
            host = getattr(ensemble.host, "forward", ensemble.host)
            known = inspect.signature(host).parameters.keys() - {"labels"}
            known |= {"sequence_ids"} if self.asks != "text" else set()
            self.tensors = tuple(TensorSpec(k, "INT64", (-1, -1)) for k in batch if k in known)
        else:
            pixels = self._pixels(Image.new("RGB", (64, 64), (127, 127, 127)))
            self.tensors = (TensorSpec("pixel_values", "FP32", (-1, *pixels.shape)),)
            batch = self._batch([{"pixel_values": pixels}])
        outputs = ensemble.predict(batch).member_outputs  # the first call is slow
        self.members, self.classes = outputs.shape[1], 2 if task.ragged else outputs.shape[-1]

    def prepare(self, image: Any) -> Row:
        """Turn a PIL image into a row, by the ensemble's own transform."""
        return {"pixel_values": self._pixels(image)}

    def _pixels(self, image: Any) -> np.ndarray:
        if self._transform is None:
            raise DataError("This model reads texts, not images.")
        return np.asarray(self._transform(image).numpy())

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """Predict rows of one kind."""
        prediction = self.ensemble.predict(self._batch(rows)).to_numpy()
        return replace(prediction, class_names=self.class_names)

    def _batch(self, rows: Sequence[Row]) -> Any:
        if texts_of(rows[0]):
            return prepare(self.ensemble, list(rows))
        columns = {name: torch.from_numpy(array) for name, array in stacked(rows).items()}
        if self.reads == "text":
            return columns
        images = columns["pixel_values"].to(self._dtype)
        return images if self._key is None else {self._key: images}

    def explain(self, row: Row) -> dict[str, Any] | None:
        """Return terms, nearest known examples and plain facts behind a row's novelty."""
        if not self.has_novelty:
            return None
        raw = [row] if isinstance(row, str) else None
        return self.ensemble.why_novel(self._batch([row]), raw=raw).to_dict(0)

    def drift(self, window: int) -> Drift | None:
        """Return a test of the stream against the known data."""
        return Drift(self.ensemble, window=window) if self.has_novelty else None


def _in_words(policy: Policy) -> str:
    """Say what a policy does and guarantees."""
    guarantees = []
    if policy.risk is not None and policy.method == "conformal":
        guarantees.append(f"at most {100 * policy.risk:.3g} % are answered and wrong")
    if policy.alarm is not None and policy.method != GIVEN:
        guarantees.append(f"at most {100 * policy.alarm:.3g} % are called new")
    sureness = policy.threshold < math.inf
    return rule_in_words(sureness=sureness, alarm=policy.alarm, guarantees=guarantees)
