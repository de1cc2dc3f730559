"""An ensemble as a function of rows: columns in, columns of answers out.

`datasets.map`, a Ray Data pool and bulk prediction call it. What cannot be answered says why in the
column `error`; it never stops the others.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..data.hub import IMAGE_COLUMNS
from ..data.texts import TEXT_COLUMNS
from ..errors import DataError

FILE_COLUMNS = ("file", "file_name", "filename", "path")


class RowAnswers:
    """Answers rows.

    Args:
        ensemble: What answers.
        column: The column of texts or pictures (PIL images, encoded bytes, arrays, paths); by
            default the usual names.
        prefix: Of the columns of answers.
        probabilities: Add all classes' probabilities.
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
        """Return the columns of answers to rows given by column."""
        values = list(rows[self.input_column(list(rows))])
        answers: list[dict[str, Any]] = []
        for start in range(0, len(values), self.batch_size):
            answers += self._answer(values[start : start + self.batch_size])
        return {
            f"{self.prefix}{name}": [answer.get(name) for answer in answers]
            for name in self.columns()
        }

    def columns(self) -> list[str]:
        """Return the names of the answers, without the prefix."""
        names = ["label", "class", "probability", "uncertainty", "mutual_information"]
        if self.ensemble.novelty is not None:
            names += ["novelty", "novelty_score"]
        if self.ensemble.policy is not None:
            names += ["decision", "abstain"]
        return [*names, *(["probabilities"] if self.probabilities else []), "error"]

    def input_column(self, names: Sequence[str]) -> str:
        """Return the column that is read."""
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
        """Answer rows together; when that fails, each by itself."""
        inputs = [self._input(value) for value in values]
        good = [place for place, (_, error) in enumerate(inputs) if error is None]
        found: list[dict[str, Any]] = [{"error": error, "abstain": True} for _, error in inputs]
        try:
            answers = self._predict([inputs[place][0] for place in good])
        except Exception as error:  # whatever one row does to the model, the others go on
            if len(good) == 1:
                found[good[0]]["error"] = _reason(error)
                return found
            answers = [answer for place in good for answer in self._answer([values[place]])]
        for place, answer in zip(good, answers, strict=True):
            found[place] = answer
        return found

    def _input(self, value: Any) -> tuple[Any, str | None]:
        """Return a row's text or picture, or what is wrong with it."""
        if self.ensemble.tokenizer is not None:
            if not isinstance(value, str):
                return None, f"found {type(value).__name__} where a text was expected"
            return value, None
        try:
            return _picture(value), None
        except Exception as error:  # a broken file breaks its decoder in many ways
            return None, _reason(error)

    def _predict(self, inputs: list[Any]) -> list[dict[str, Any]]:
        if not inputs:
            return []
        answer = self.ensemble.predict(inputs).cpu()
        columns = {
            "class": answer.label,
            "probability": answer.confidence,
            "uncertainty": answer.uncertainty,
            "mutual_information": answer.mutual_information,
            "novelty": answer.novelty,
            "novelty_score": answer.novelty_score,
            "abstain": answer.abstain,
            "probabilities": answer.probabilities if self.probabilities else None,
        }
        lists = {name: value.tolist() for name, value in columns.items() if value is not None}
        if answer.decisions is not None:
            lists["decision"] = answer.decisions
        names = self.ensemble.id2label or {}
        return [
            {
                "label": names.get(number, str(number)),
                **{name: values[place] for name, values in lists.items()},
            }
            for place, number in enumerate(lists["class"])
        ]


def _reason(error: Exception) -> str:
    """Return an error in words that are the same at every run: no address of an object."""
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", str(error))
    return f"{type(error).__name__}: {text[:200]}"


def _picture(value: Any) -> Any:
    """Return a PIL image of what a column of pictures holds."""
    from PIL import Image

    if isinstance(value, Mapping):  # as the `datasets` library stores pictures
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        value = io.BytesIO(value)
    elif hasattr(value, "__array__") and not hasattr(value, "convert"):
        return Image.fromarray(value.__array__())
    if isinstance(value, (str, os.PathLike, io.BytesIO)):
        with Image.open(value) as picture:
            picture.load()
            return picture
    if not hasattr(value, "convert"):
        raise DataError(f"found {type(value).__name__} where a picture was expected")
    return value
