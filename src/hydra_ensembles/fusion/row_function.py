"""An ensemble as a function of rows: columns in, columns of answers out.

`datasets.map`, a Ray Data pool and bulk prediction call it. A row that cannot be answered gets the
reason in the column `error` and never stops the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.image_data import IMAGE_COLUMNS
from ..data.loaders import as_data
from ..data.text_files import TEXT_COLUMNS
from ..errors import DataError, UnsupportedModelError
from ..runtime.images import open_image
from .inputs import is_raw

FILE_COLUMNS = ("file", "file_name", "filename", "path")


class RowAnswers:
    """Answers rows.

    Args:
        ensemble: The ensemble that answers.
        column: The column of texts or pictures (PIL images, encoded bytes, arrays, paths); by
            default the usual names.
        prefix: Prefix of the columns of answers.
        probabilities: Whether to add the probabilities of all classes.
        batch_size: Rows that run through the model together.
    """

    def __init__(
        self,
        ensemble: Any,
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
        """Return the columns of answers for rows given as columns."""
        values = list(rows[self.input_column(list(rows))])
        answers: list[dict[str, Any]] = []
        for start in range(0, len(values), self.batch_size):
            answers += self._answer(values[start : start + self.batch_size])
        return {
            f"{self.prefix}{name}": [answer.get(name) for answer in answers]
            for name in self.columns()
        }

    def columns(self) -> list[str]:
        """Return the names of the columns of answers, without the prefix."""
        names = ["label", "class", "probability", "uncertainty", "mutual_information"]
        if self.ensemble.novelty is not None:
            names += ["novelty", "novelty_score"]
        if self.ensemble.policy is not None:
            names += ["decision", "abstain"]
        return [*names, *(["probabilities"] if self.probabilities else []), "error"]

    def input_column(self, names: Sequence[str]) -> str:
        """Return the name of the column to read."""
        if self.column is not None:
            known: Sequence[str] = (self.column,)
        elif self.ensemble.tokenizer is not None:
            known = TEXT_COLUMNS
        else:
            known = (*IMAGE_COLUMNS, *FILE_COLUMNS)
        for name in known:
            if name in names:
                return name
        raise DataError(
            f"No column {' or '.join(known)} among {', '.join(map(str, names))}: name the column "
            "of the texts or pictures."
        )

    def _answer(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Answer rows together; if that fails, one by one."""
        inputs = [self._input(value) for value in values]
        good = [place for place, (_, error) in enumerate(inputs) if error is None]
        rows: list[dict[str, Any]] = [{"error": error, "abstain": True} for _, error in inputs]
        try:
            answers = self._predict([inputs[place][0] for place in good])
        except Exception as error:  # a bad row must not stop the others
            if len(good) == 1:
                rows[good[0]]["error"] = _reason(error)
                return rows
            answers = [answer for place in good for answer in self._answer([values[place]])]
        for place, answer in zip(good, answers, strict=True):
            rows[place] = answer
        return rows

    def _input(self, value: Any) -> tuple[Any, str | None]:
        """Return a row's text or picture, or what is wrong with it."""
        if self.ensemble.tokenizer is not None:
            if not isinstance(value, str):
                return None, f"found {type(value).__name__} where a text was expected"
            return value, None
        try:
            if isinstance(value, Mapping):  # as the `datasets` library stores images
                value = value.get("bytes") or value.get("path")
            return open_image(value), None
        except Exception as error:  # decoders raise many kinds of errors on broken files
            return None, _reason(error)

    def _predict(self, inputs: list[Any]) -> list[dict[str, Any]]:
        if not inputs:
            return []
        answer = self.ensemble.predict(inputs).cpu()
        columns = {
            "class": answer.class_index,
            "probability": answer.confidence,
            "uncertainty": answer.uncertainty,
            "mutual_information": answer.mutual_information,
            "novelty": answer.novelty,
            "novelty_score": answer.novelty_score,
            "abstain": answer.abstain,
            "probabilities": answer.probabilities if self.probabilities else None,
        }
        lists = {name: value.tolist() for name, value in columns.items() if value is not None}
        if answer.decision is not None:
            lists["decision"] = answer.decision
        names = self.ensemble.id2label or {}
        return [
            {
                "label": names.get(number, str(number)),
                **{name: values[place] for name, values in lists.items()},
            }
            for place, number in enumerate(lists["class"])
        ]


def _reason(error: Exception) -> str:
    """Return an error's text without object addresses, so that it is the same in every run."""
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", str(error))
    return f"{type(error).__name__}: {text[:200]}"


# Predictions in scikit-learn's form: an array of probabilities.
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
