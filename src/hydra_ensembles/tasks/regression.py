"""One or several numbers per input: members are averaged, squared error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..prediction import Prediction
from ..registry import Registry
from ..task_predictions import RegressionPrediction
from ..uncertainty import Calibrator, Score
from .task import Facts, Task, tasks, wrong_shape

_CLASSIFIERS = ("classifier", "score", "classification_head")

number_scores: Registry[Score] = Registry("score of regression")
"""Uncertainty scores by name: functions of members' numbers `[batch, member, n]` to `[batch]`."""


@number_scores.register("spread")
def spread(member_values: Tensor) -> Tensor:
    """Return the members' standard deviation, `[batch]`; of several numbers the root of the sum.

    Divided by the number of members, so that one member has none.
    """
    return member_values.var(1, correction=0).sum(-1).sqrt()


@tasks.register("regression")
@dataclass(frozen=True)
class Regression(Task):
    """Members' numbers are averaged; the loss is the squared error of the mean.

    Attributes:
        tolerance: An answer is wrong if any of its numbers is further off; None: none is wrong.
    """

    name: ClassVar[str] = "regression"
    title: ClassVar[str] = "regression"
    prediction: ClassVar[type[Prediction]] = RegressionPrediction
    scores: ClassVar[Registry[Score]] = number_scores
    default_score: ClassVar[str] = "spread"
    sets: ClassVar[tuple[str, ...]] = ("normalised", "plain")
    calibrators: ClassVar[Mapping[str, str]] = {"variance": "members' spread and a residual"}

    tolerance: float | None = None

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task where the config says so, or names one label, as transformers does."""
        if facts.problem == "regression" and facts.classifies:
            return cls()
        one = facts.problem is None and getattr(facts.config, "num_labels", 2) == 1
        reads = facts.classifies or any(hasattr(facts.model, name) for name in _CLASSIFIERS)
        return cls() if one and reads and "MultipleChoice" not in facts.name else None

    def answer(
        self,
        outputs: Tensor,
        /,
        *,
        score: str | Score = "spread",
        temperature: float | Tensor | None = None,
        member_temperatures: Sequence[float] | Tensor | None = None,
        logit_scale: float | Tensor | None = None,
        class_names: Sequence[str] | None = None,
        student_logits: Tensor | None = None,
        calibrator: Calibrator | None = None,
    ) -> Prediction:
        """Turn the members' numbers `[batch, member, number]` into their mean and spread."""
        outputs = _numbers(outputs)
        values = outputs.mean(1) if student_logits is None else student_logits
        return RegressionPrediction(
            values=values,
            spread=outputs.std(1, correction=0),
            sigma=None if calibrator is None else calibrator(outputs),
            uncertainty=self.score(outputs, score),
            member_values=outputs,
            score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
            class_names=class_names,
            student_values=student_logits,
        )

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the members' mean, `[batch, number]`."""
        return outputs.mean(1)

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the squared error, mean over the numbers, `[batch]`."""
        outputs = outputs.float()
        labels = labels.to(outputs).reshape(outputs.shape)
        return F.mse_loss(outputs, labels, reduction="none").mean(-1)

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return finite numbers `[example, number]`."""
        labels = labels.detach().cpu().float()
        labels = labels[:, None] if labels.ndim == 1 else labels
        if labels.ndim != 2 or size not in (None, labels.shape[-1]):
            raise wrong_shape(self, labels, where, f"{size or 'its'} numbers for each example")
        if not bool(labels.isfinite().all()):
            raise DataError(f"Labels in {where} hold NaN or infinity. Leave those examples out.")
        return labels

    def errors(self, answer: Prediction, labels: Tensor) -> Tensor | None:
        """Tell where a number is further off than the tolerance, bool `[batch]`."""
        if self.tolerance is None:
            return None
        off = (answer.values - labels.to(answer.values).reshape(answer.values.shape)).abs()
        return (off > self.tolerance).any(-1)


def _numbers(outputs: Tensor) -> Tensor:
    wide = outputs.dtype in (torch.float32, torch.float64)
    return outputs if wide else outputs.float()
