"""Fit what calibrates an ensemble on labelled data (`evaluation.cross_fit`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..data.eval_mode import in_eval
from ..data.memory import Halving
from ..data.padding import joined_rows
from ..data.processes import in_order
from ..data.progress import length_of, progress_bar
from ..errors import DataError
from ..evaluation.cross_fit import Calibration, fit_answer
from .ensemble import HydraEnsemble
from .known_data import run_of


def fit_calibrator(
    ensemble: HydraEnsemble,
    held_out: Iterable[Any],
    *,
    kind: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Calibration:
    """Calibrate an ensemble on labelled data, in place; `build`, `fold` and `distill` do it too.

    Sets `ensemble.temperature` and `ensemble.calibrator`, which are saved with it. A policy that
    was fitted before is dropped: its thresholds belong to other uncertainties.

    Args:
        ensemble: A `HydraEnsemble`.
        held_out: A few hundred labelled examples that trained nothing and chose no heads.
        kind: `"auto"` fits one temperature, and a calibrator with more numbers where its NLL is
            clearly lower on examples that it was not fitted on (paired 95 % interval). `"none"`
            removes what there is; `"temperature"` fits only that. Of classes also `"vector"`
            (scaling) and `"isotonic"` (regression of the top label), of several labels `"platt"`,
            of numbers `"variance"`.
        seed: Seed of the folds.
        progress: Show a bar on a terminal.

    Returns:
        What was chosen; `ensemble.record["calibration"]` says why.

    Example:
        >>> fit_calibrator(ensemble, held_out).calibrator
        >>> ensemble.record["calibration"]["why"]
    """
    task = ensemble.task
    outputs, student, labels = _collected(ensemble, held_out, progress=progress)
    numbers = student if student is not None and not task.has_temperatures else None
    answering = outputs if student is None or numbers is not None else student[:, None]
    found, record = fit_answer(task, answering, labels, kind=kind, student=numbers, seed=seed)
    ensemble.temperature, ensemble.calibrator = found.temperature, found.calibrator
    ensemble.member_temperatures = None
    if student is not None and found.temperature is not None:  # the members' disagreement
        members = fit_answer(task, outputs, labels, kind="temperature")[0].temperature
        assert members is not None
        ensemble.member_temperatures = [members] * ensemble.members
    each = {"member_temperatures": ensemble.member_temperatures}
    ensemble.record["calibration"] = {"score": ensemble.score, **record, **found.to_dict(), **each}
    return found


@torch.no_grad()
def _collected(
    ensemble: HydraEnsemble, data: Iterable[Any], *, progress: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return raw outputs of the members and of a student, and labels, by example."""
    model, task, name = in_eval(ensemble), ensemble.task, "calibration"
    halving = Halving(name)

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        columns: dict[str, list[Tensor]] = {}
        for part, run in halving(partial(run_of, model, summaries=False), batch):
            _, inputs, given = split_batch(part)
            if given is None:
                raise DataError(f"Batch {index} has no labels to calibrate on.")
            outputs, labels = task.examples(run.member_logits.float().cpu(), given, inputs)
            assert labels is not None
            columns.setdefault("outputs", []).append(outputs)
            columns.setdefault("labels", []).append(task.check_labels(labels, name))
            if run.student_logits is not None:
                columns.setdefault("student", []).append(run.student_logits.float().cpu())
        return {key: torch.cat(values) for key, values in columns.items()}

    results = in_order(data, work, name=name)
    found = list(progress_bar(results, description=name, enabled=progress, total=length_of(data)))
    if not found:
        raise DataError("There are no examples to calibrate on.")
    outputs = joined_rows([part["outputs"] for part in found])
    student = [part["student"] for part in found if "student" in part]
    labels = torch.cat([part["labels"] for part in found])
    return outputs, joined_rows(student) if student else None, labels
