"""What an ensemble is compared with: one model or several, with a temperature as it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..uncertainty import Prediction


class Calibrated:
    """Models that answer together, with one temperature: a single model, or a Deep Ensemble.

    Novelty, where the models have it, is the mean of theirs: features of models that were trained
    apart have no mean.

    Args:
        models: The models.
        data: Labelled data to fit the temperature on, none of which is tested; None for none.
    """

    def __init__(self, models: Sequence[Any], data: Any = None) -> None:
        from ..data.running import collect_logits
        from ..uncertainty import fit_temperature

        self.models, self.temperature = models, 1.0
        if data is not None:
            logits, labels = collect_logits(self, data, name="calibration", need_labels=True)
            assert labels is not None  # need_labels
            self.temperature = fit_temperature(logits, labels)

    def predict(self, batch: Any) -> Prediction:
        """Answer with the members' scaled logits, and how new each example is to them."""
        import torch

        from ..data.running import evaluating, member_logits
        from ..uncertainty import predict_from_logits

        logits = []
        for model in self.models:
            with evaluating(model):
                logits.append(member_logits(model, batch))
        found = predict_from_logits(torch.cat(logits, 1), temperature=self.temperature)
        if any(getattr(model, "novelty", None) is None for model in self.models):
            return found
        scores = torch.stack([model.predict(batch).novelty_score for model in self.models])
        return replace(found, novelty_score=scores.mean(0))
