"""Which trunk, and whether a student answers: by held-out NLL, each at one temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.model_runs import run_model
from ..evaluation.cross_fit import fit_answer
from ..evaluation.metrics import negative_log_likelihood
from ..fusion.ensemble import HydraEnsemble
from ..tasks import Task
from ..uncertainty import find_temperature
from .fold_rows import Trunk

Choice = tuple[Trunk, bool]
"""A trunk, and whether a student answers."""


@dataclass(frozen=True)
class HeldOut:
    """Raw logits of a folded ensemble on held-out data.

    Attributes:
        members: `[example, member, class]`.
        student: `[example, 1, class]`, or None.
        labels: `[example]`, or as the task has them.
        task: What they mean.
    """

    members: Tensor
    student: Tensor | None
    labels: Tensor
    task: Task

    @classmethod
    def of(cls, ensemble: HydraEnsemble, data: Any, *, progress: bool) -> HeldOut:
        """Run an ensemble without temperatures over labelled data."""
        answers = list(
            run_model(ensemble, data, name="held-out", need_labels=True, progress=progress)
        )
        students = [one.student_logits for one in answers if one.student_logits is not None]
        return cls(
            torch.cat([one.logits for one in answers]),
            torch.cat(students)[:, None] if students else None,
            torch.cat([one.labels for one in answers if one.labels is not None]),
            ensemble.task,
        )

    def nll(self, *, student: bool, seed: int) -> Tensor:
        """Return each example's NLL at the temperature of the other half, `[example]`.

        Without classes it is the task's loss.
        """
        logits = self.student if student else self.members
        assert logits is not None
        if not self.task.classifies:
            return self.task.losses(self.task.mean(logits), self.labels).double()
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        result = torch.empty(len(logits), dtype=torch.float64)
        for judged, fitted in (halves, halves[::-1]):
            by = find_temperature(logits[fitted], self.labels[fitted]).temperature
            scaled = logits[judged].double() / by
            result[judged] = negative_log_likelihood(scaled, self.labels[judged])
        return result


def choose(nll: Mapping[Choice, Tensor]) -> Choice:
    """Choose the simplest of the ways that are level with the best.

    Level is a mean difference of at most one standard error, example by example.

    Args:
        nll: Each way's NLL `[example]`, the simplest way first.
    """
    best = min(nll, key=lambda way: float(nll[way].mean()))
    for way, losses in nll.items():
        excess = losses - nll[best]
        if way == best or float(excess.mean()) <= float(excess.std()) / len(excess) ** 0.5:
            return way
    raise AssertionError("the best way is level with itself")


def calibrate_(ensemble: HydraEnsemble, held_out: HeldOut) -> dict[str, Any]:
    """Calibrate what answers, in place; return what the record says about it.

    That is one temperature, and a calibrator where its gain is clear (`fit_answer`). With a
    student, the members get the one temperature of theirs too: it does not change the answer, but
    their disagreement is that of calibrated members.
    """
    task, student, labels = held_out.task, held_out.student, held_out.labels
    numbers = None if student is None or task.has_temperatures else student[:, 0]
    answering = held_out.members if student is None or numbers is not None else student
    found, record = fit_answer(task, answering, labels, student=numbers)
    ensemble.temperature, ensemble.calibrator = found.temperature, found.calibrator
    if student is None or found.temperature is None:
        return record
    fitted = find_temperature(held_out.members, labels)
    ensemble.member_temperatures = [fitted.temperature] * ensemble.members
    return record | {"members' temperature": fitted.temperature}
