"""What MLflow runs to have an ensemble as a pyfunc model; it is copied into the artefact."""

from __future__ import annotations

from typing import Any

import mlflow
from mlflow.pyfunc.model import PythonModel


class HydraModel(PythonModel):
    """Loads the ensemble beside this script and answers with a data frame."""

    def load_context(self, context: Any) -> None:
        """Load the ensemble from its folder in the artefact."""
        from hydra_ensembles import HydraEnsemble

        self.ensemble = HydraEnsemble.from_pretrained(context.artifacts["ensemble"])

    def predict(self, context, model_input, params=None):
        """Return one row per input; MLflow would read type hints as a schema."""
        from hydra_ensembles.integrations.mlflow_flavor import predict_frame

        return predict_frame(self.ensemble, model_input)


mlflow.models.set_model(HydraModel())
