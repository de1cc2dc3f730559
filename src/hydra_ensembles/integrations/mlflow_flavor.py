"""An ensemble as a pyfunc model of MLflow: its folder and a script that loads it, no pickle."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.row_function import in_batches
from ..prediction import join
from ..registry import imported

SCRIPT = Path(__file__).with_name("mlflow_script.py")
"""What MLflow runs to have the model ("models from code"): plain Python in the artefact."""

_mlflow = partial(imported, "mlflow.pyfunc", "A model of MLflow", "mlflow")


def log_model(
    ensemble: HydraEnsemble,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Log an ensemble to the active MLflow run; returns MLflow's `ModelInfo`.

    `mlflow.pyfunc.load_model(info.model_uri).predict(inputs)` returns a data frame with the columns
    of `hydra_ensembles.prediction.FIELDS`. Inputs are a list of texts or of paths of images, a data
    frame with one such column, an array or a mapping of arrays.

    Args:
        ensemble: What to log, with its transform or tokenizer.
        name: Of the model in the run.
        registered_model_name: To register it under, too.
        metadata: Plain data to keep beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = _parts(ensemble, folder, metadata)
        return _mlflow().log_model(name=name, registered_model_name=registered_model_name, **given)


def save_model(
    ensemble: HydraEnsemble, path: str | Path, *, metadata: dict[str, Any] | None = None
) -> None:
    """Write an ensemble as a folder that MLflow serves and loads; see `log_model`."""
    with tempfile.TemporaryDirectory() as folder:
        _mlflow().save_model(path=str(path), **_parts(ensemble, folder, metadata))


def predict_frame(ensemble: HydraEnsemble, inputs: Any, *, batch_size: int = 32) -> Any:
    """Predict what MLflow hands over; return a data frame with a row per input."""
    if hasattr(inputs, "columns"):  # a data frame
        names = list(map(str, inputs.columns))
        pairs = {("question", "context"), ("text", "text_pair")}
        if len(names) != 1 and tuple(names) not in pairs:
            raise DataError(
                f"The data frame has the columns {names}; expected one column, of texts or of "
                "paths of images, or 'text' and 'text_pair', or 'question' and 'context'."
            )
        inputs = inputs.iloc[:, 0].tolist() if len(names) == 1 else inputs.to_dict("records")
    elif getattr(getattr(inputs, "dtype", None), "kind", "") in ("O", "U"):  # an array of texts
        inputs = inputs.tolist()
    elif isinstance(inputs, Mapping):
        inputs = {str(name): torch.as_tensor(values) for name, values in inputs.items()}
    answers = [ensemble.predict(batch).cpu() for batch in in_batches(inputs, batch_size)]
    if not answers:
        raise DataError("There are no inputs to predict.")
    return join(answers).to_pandas()


def _parts(ensemble: HydraEnsemble, folder: str, metadata: dict[str, Any] | None) -> dict[str, Any]:
    place = Path(folder) / "ensemble"
    ensemble.save_pretrained(place)
    return {
        "python_model": str(SCRIPT),
        "artifacts": {"ensemble": str(place)},
        # named, since MLflow would otherwise load the model in another process to find out
        "pip_requirements": [f"hydra-ensembles[hosts]=={__version__}", "pandas"],
        "metadata": {
            "members": ensemble.members,
            "host": type(ensemble.host).__name__,
            **(metadata or {}),
        },
    }
