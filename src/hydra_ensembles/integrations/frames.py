"""Inputs as data frames and arrays, answers as a data frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.row_function import in_batches
from .pipelines import DECISIONS

COLUMNS = (
    *("probability", "uncertainty", "mutual_information"),
    *("disagreement", "novelty", "novelty_score"),
)


def answers_frame(ensemble: HydraEnsemble, inputs: Any, *, batch_size: int = 32) -> Any:
    """Return a row per input: label, probability, uncertainty, novelty, decision ...

    Args:
        ensemble: What answers.
        inputs: A list of texts or of paths of pictures, a data frame with one such column, an
            array or a mapping of arrays.
        batch_size: Inputs per forward pass.
    """
    import pandas

    answers = [ensemble.predict(b).cpu() for b in in_batches(_plain(inputs), batch_size)]
    if not answers:
        raise DataError("There are no inputs to answer.")
    names = ensemble.id2label
    labels = torch.cat([answer.label for answer in answers]).tolist()
    table: dict[str, Any] = {"label": [names[i] if names else i for i in labels]}
    for column in COLUMNS:
        source = "confidence" if column == "probability" else column
        parts = [getattr(answer, source) for answer in answers]
        if parts[0] is not None:
            table[column] = torch.cat(parts).double().numpy()
    decisions = [answer.decision for answer in answers if answer.decision is not None]
    if decisions:
        table["decision"] = [DECISIONS[i] for i in torch.cat(decisions).tolist()]
    return pandas.DataFrame(table)


def _plain(inputs: Any) -> Any:
    if hasattr(inputs, "columns"):  # a data frame
        if len(inputs.columns) != 1:
            raise DataError(
                f"A data frame with the columns {list(map(str, inputs.columns))}: expected one "
                "column, of texts or of paths of pictures."
            )
        return inputs.iloc[:, 0].tolist()
    if getattr(getattr(inputs, "dtype", None), "kind", "") in ("O", "U"):  # an array of texts
        return inputs.tolist()
    if isinstance(inputs, Mapping):
        return {str(name): torch.as_tensor(values) for name, values in inputs.items()}
    return inputs
