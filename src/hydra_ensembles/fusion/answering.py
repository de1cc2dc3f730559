"""Predictions in scikit-learn's form: an array of probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..data.batches import as_data
from ..errors import DataError, UnsupportedModelError
from .inputs import is_raw


def predict_proba(ensemble: Any, data: Any, *, batch_size: int) -> np.ndarray[Any, Any]:
    """Return probabilities `[example, class]`; see `HydraEnsemble.predict_proba`."""
    answers = [ensemble.predict(batch) for batch in in_batches(data, batch_size)]
    if not answers:
        raise DataError("The data is empty: it gave no example to answer.")
    if answers[0].probabilities.ndim != 2:
        raise UnsupportedModelError(
            f"{type(ensemble.host).__name__} answers for every token, so its probabilities are not "
            "a table [example, class]. Call predict() batch by batch."
        )
    return torch.cat([answer.probabilities.cpu() for answer in answers]).numpy()


def in_batches(data: Any, batch_size: int) -> Iterable[Any]:
    """Return batches of raw inputs, arrays, data sets or data."""
    if is_raw(data):
        items = list(data) if isinstance(data, (list, tuple)) else [data]
        return [items[i : i + batch_size] for i in range(0, len(items), batch_size)]
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
        data = data.float() if data.is_floating_point() else data  # numpy's default is float64
    return as_data(data, batch_size=batch_size)
