"""An ensemble as a function of rows: columns in, columns of answers out.

`datasets.map`, a Ray Data pool and bulk prediction call it. A row that cannot be answered gets the
reason in the column `error` and never stops the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..answer_each import InputError, answer_each
from ..data.image_data import IMAGE_COLUMNS
from ..data.loaders import as_data
from ..data.text_files import PAIR_COLUMNS, TEXT_COLUMNS
from ..errors import DataError, UnsupportedModelError
from ..runtime.images import open_image
from .inputs import is_raw

if TYPE_CHECKING:
    from .fused_model import FusedModel

FILE_COLUMNS = ("file", "file_name", "filename", "path")


class RowAnswers:
    """Answers rows given as columns.

    Args:
        ensemble: The ensemble that answers.
        column: The column of texts or images (PIL images, encoded bytes, arrays, paths); by
            default the usual names.
        prefix: Prefix of the columns of answers.
        probabilities: Whether to add the probabilities of all classes.
        batch_size: Rows that run through the model together.
    """

    def __init__(
        self,
        ensemble: FusedModel,
        *,
        column: str | None = None,
        prefix: str = "predicted_",
        probabilities: bool = False,
        batch_size: int = 32,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more.")
        self.ensemble, self.column, self.prefix = ensemble, column, prefix
        self.probabilities, self.batch_size = probabilities, batch_size

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns of answers: the fields of a row, and `error`, each with the prefix."""
        columns = [list(rows[name]) for name in self.input_columns(list(rows))]
        single = len(columns) == 1
        names = ("question", "context") if self._asked else ("text", "text_pair")
        values: list[Any] = columns[0]
        if not single:
            values = [dict(zip(names, pair, strict=True)) for pair in zip(*columns, strict=True)]
        answers: list[dict[str, Any] | InputError] = []
        for start in range(0, len(values), self.batch_size):
            part = values[start : start + self.batch_size]
            answers += answer_each(self._predict, part, prepare=self._input)
        found: dict[str, list[Any]] = {}
        kind = self.ensemble.task.prediction
        for name in [*kind.FIELDS, *(["probabilities"] if self.probabilities else [])]:
            given = [None if isinstance(row, InputError) else row[name] for row in answers]
            found[self.prefix + name] = given
        errors = [row.reason if isinstance(row, InputError) else None for row in answers]
        return {**found, f"{self.prefix}error": errors}

    @property
    def _asked(self) -> bool:
        return "answer" in self.ensemble.task.prediction.FIELDS

    def input_columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the columns to read: one, or two that are read together."""
        if self.column is None and self.ensemble.tokenizer is not None:
            by_token = self.ensemble.task.by_token
            pairs = (("question", "context"),) if self._asked else () if by_token else PAIR_COLUMNS
            both = next((pair for pair in pairs if set(pair) <= set(names)), None)
            if both is not None:
                return both
        if self.column is not None:
            known: Sequence[str] = (self.column,)
        elif self.ensemble.tokenizer is not None:
            known = TEXT_COLUMNS
        else:
            known = (*IMAGE_COLUMNS, *FILE_COLUMNS)
        for name in known:
            if name in names:
                return (name,)
        raise DataError(
            f"No column {' or '.join(known)} among {', '.join(map(str, names))}: name the column "
            "of the texts or images."
        )

    def _input(self, value: Any) -> Any:
        if self.ensemble.tokenizer is None:
            if isinstance(value, Mapping):  # as the `datasets` library stores images
                value = value.get("bytes") or value.get("path")
            return open_image(value)
        for text in value.values() if isinstance(value, Mapping) else (value,):
            if not isinstance(text, str):
                raise DataError(f"found {type(text).__name__} where a text was expected")
        return value

    def _predict(self, inputs: list[Any]) -> list[dict[str, Any]]:
        return self.ensemble.predict(inputs).rows(probabilities=self.probabilities)


# Predictions in scikit-learn's form: an array of probabilities.
def predict_proba(ensemble: FusedModel, data: Any, *, batch_size: int) -> np.ndarray[Any, Any]:
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
