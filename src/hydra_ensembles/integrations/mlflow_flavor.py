"""An ensemble as a pyfunc model of MLflow: its folder and a script that loads it, no pickle."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import MissingDependencyError
from ..fusion.ensemble import HydraEnsemble

SCRIPT = Path(__file__).with_name("mlflow_script.py")
"""What MLflow runs to have the model ("models from code"): plain Python in the artefact."""


def log_model(
    ensemble: HydraEnsemble,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Log an ensemble to the active MLflow run; returns MLflow's `ModelInfo`.

    `mlflow.pyfunc.load_model(info.model_uri).predict(inputs)` answers with a data frame: label,
    probability, uncertainty, mutual information, disagreement, novelty and decision where there are
    any. Inputs are a list of texts or of paths of pictures, a data frame with one such column, an
    array or a mapping of arrays.

    Args:
        ensemble: What to log, with its transform or tokenizer.
        name: Of the model in the run.
        registered_model_name: To register it under, too.
        metadata: Plain data to keep beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = _parts(ensemble, folder, metadata)
        return _pyfunc().log_model(name=name, registered_model_name=registered_model_name, **given)


def save_model(
    ensemble: HydraEnsemble, path: str | Path, *, metadata: dict[str, Any] | None = None
) -> None:
    """Write an ensemble as a folder that MLflow serves and loads; see `log_model`."""
    with tempfile.TemporaryDirectory() as folder:
        _pyfunc().save_model(path=str(path), **_parts(ensemble, folder, metadata))


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


def _pyfunc() -> Any:
    try:
        import mlflow.pyfunc
    except ImportError as error:
        raise MissingDependencyError(
            "MLflow is not installed: pip install 'hydra-ensembles[mlflow]'."
        ) from error
    return mlflow.pyfunc
