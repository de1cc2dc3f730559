"""Class names on the command line: those that are given, and an order that is assumed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DataError
from .output import is_first, status, waiting

if TYPE_CHECKING:
    from ..prediction import Prediction


def read_names(given: str | None) -> list[str] | None:
    """Read class names from a file with one per line, or from `a,b,c`."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if path.is_file():
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        return [name for name in names if name]
    if "," not in given:
        raise DataError(f"--class-names {given}: not a file, and not a list such as cat,dog.")
    return [name.strip() for name in next(csv.reader([given], skipinitialspace=True))]


def check_labels(labels: Any, count: int | None, *, source: str, model: str) -> None:
    """Raise when data has a class that the model does not know."""
    if labels is None or count is None or not len(labels):
        return
    most = int(labels.max())
    if most >= count:
        raise DataError(
            f"{source} has the label {most}, but {model} has {count} classes (0 to {count - 1}). "
            "Is it the right label column?"
        )


def check_order(loaded: Any, data: Any) -> None:
    """Print the class order that was assumed, if any, and raise when another fits better.

    The next data of the model (a `Loaded`) is read in the same order.
    """
    from ..data.class_names import check_class_order, shown_order

    assumed = getattr(data, "assumed_order", None)
    if not assumed:
        return
    if is_first():  # a warning: also with --quiet
        status.cancel()
        typer.echo(
            f"Class order assumed: {shown_order(data.class_names)} ({assumed}; {loaded.name} has "
            "no class names). Pass --class-names to set it.",
            err=True,
        )
    with waiting("Checking the class order"):
        check_class_order(loaded.model, data, name=loaded.name)
    loaded.spellings = [(name,) for name in data.class_names]


def calibrated(model: Any, data: Any) -> Any:
    """Return a model calibrated as its task is, on labelled data; where nothing can be, itself."""
    from ..fusion import HydraEnsemble, fit_calibrator, fuse
    from ..heads.head_mask import HeadMask
    from ..tasks import task_of

    task = task_of(model)
    if task.classifies and not task.by_token:
        return Calibrated([model], data)
    if not task.calibrators:
        return model
    fused = model if isinstance(model, HydraEnsemble) else fuse(model, [HeadMask.full(model)])
    fit_calibrator(fused, data, progress=False)
    return fused


class Calibrated:
    """Models that answer together, with one temperature: a single model, or a Deep Ensemble.

    Novelty, where the models have it, is the mean of theirs: features of models that were trained
    apart have no mean.

    Args:
        models: The models.
        data: Labelled data to fit the temperature on, none of which is tested; None for none.
    """

    def __init__(self, models: Sequence[Any], data: Any = None) -> None:
        from ..data.model_runs import collect_logits
        from ..uncertainty import fit_temperature

        self.models, self.temperature = models, 1.0
        if data is not None:
            logits, labels = collect_logits(self, data, name="calibration", need_labels=True)
            assert labels is not None  # need_labels
            self.temperature = fit_temperature(logits, labels)

    def predict(self, batch: Any) -> Prediction:
        """Answer with the members' scaled logits, and how new each example is to them."""
        import torch

        from ..data.eval_mode import evaluating
        from ..data.model_runs import answering_logits
        from ..uncertainty import predict_from_logits

        logits = []
        for model in self.models:
            with evaluating(model):
                logits.append(answering_logits(model, batch))
        found = predict_from_logits(torch.cat(logits, 1), temperature=self.temperature)
        if any(getattr(model, "novelty", None) is None for model in self.models):
            return found
        scores = torch.stack([model.predict(batch).novelty_score for model in self.models])
        return replace(found, novelty_score=scores.mean(0))
