"""What the fields of an answer are, by task: JSON types, and tensors of the protocol."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..prediction import DECIDED, DECISIONS, WHY, ClassPrediction, Prediction
from ..task_predictions import (
    TASK_PREDICTIONS,
    EmbeddingPrediction,
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)

Json = dict[str, Any]

KINDS: tuple[type[Prediction], ...] = (ClassPrediction, *TASK_PREDICTIONS)
"""Answers of all tasks."""

TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
SHARE = {**NUMBER, "minimum": 0, "maximum": 1}


def or_null(kind: Json) -> Json:
    """Return a type that may also be null."""
    return {**kind, "type": [kind["type"], "null"]}


def list_of(kind: Json) -> Json:
    """Return the type of a list."""
    return {"type": "array", "items": kind}


FIELD_TYPES: dict[str, Json] = {
    "label": TEXT,
    "class": WHOLE,
    "confidence": SHARE,
    "uncertainty": NUMBER,
    "mutual_information": NUMBER,
    "disagreement": SHARE,
    "novelty": or_null(SHARE),
    "novelty_score": or_null(NUMBER),
    "decision": {"enum": [*dict.fromkeys(DECISIONS), None]},
    "why": {"enum": list(WHY)},
    "set": or_null(list_of(TEXT)),
}
"""The JSON types of fields, where the task has no other."""

_ENTITY: Json = {
    "type": "object",
    "properties": {
        "label": TEXT,
        "text": or_null(TEXT),
        "start": WHOLE,
        "end": WHOLE,
        "confidence": SHARE,
        "uncertainty": NUMBER,
    },
}
_NUMBERS: Json = {"anyOf": [NUMBER, list_of(NUMBER)]}
_NUMBERS_OR_NULL: Json = {"anyOf": [or_null(NUMBER), or_null(list_of(NUMBER))]}
_ENDS: Json = {"anyOf": [or_null(list_of(NUMBER)), or_null(list_of(list_of(NUMBER)))]}
_OF_TASKS: dict[type[Prediction], dict[str, Json]] = {
    MultiLabelPrediction: {
        "label": list_of(TEXT),
        "class": list_of(WHOLE),
        "confidence": list_of(SHARE),
    },
    RegressionPrediction: {
        "value": _NUMBERS,
        "spread": _NUMBERS,
        "sigma": _NUMBERS_OR_NULL,
        "set": _ENDS,
    },
    EmbeddingPrediction: {"embedding": list_of(NUMBER)},
    SpanPrediction: {
        "answer": or_null(TEXT),
        "start": WHOLE,
        "end": WHOLE,
        "no_answer": SHARE,
        "set": or_null(list_of({"type": "object"})),
    },
    TokenPrediction: {"entities": list_of(_ENTITY), "set": or_null(list_of(list_of(TEXT)))},
}
_BY_TEXT = ("entities", "novelty", "novelty_score", "set")
"""Fields of an answer about tokens whose type is that of the whole text."""


def json_type(kind: type[Prediction], name: str) -> Json:
    """Return the JSON type of a field of an answer; any type for a field that is not known."""
    found = _OF_TASKS.get(kind, {}).get(name, FIELD_TYPES.get(name, {}))
    if kind is TokenPrediction and name not in _BY_TEXT:
        return {"anyOf": [list_of(found), {"type": "null"}]} if name in DECIDED else list_of(found)
    return found


ARRAYS = ("probabilities", "member_logits", "member_values", "member_embeddings")
"""Columns that the protocol gives beside the fields."""

_VECTORS = {"value": "values", "spread": "spread", "embedding": "embedding"}


def tensor_type(kind: type[Prediction], name: str, width: int) -> tuple[str, tuple[int, ...]]:
    """Return datatype and shape of a field in the protocol; lists of any length are JSON texts.

    Args:
        kind: The answer.
        name: A key of its `FIELDS`.
        width: Number of the model's numbers or of the width of its vectors.
    """
    found = json_type(kind, name)
    if name in _VECTORS:
        return "FP32", (-1, width)
    if found.get("type") == "integer":
        return "INT64", (-1,)
    if "number" in np.atleast_1d(found.get("type", "")):
        return "FP32", (-1,)
    return "BYTES", (-1,)


def tensor_of(answers: Prediction, name: str, datatype: str) -> np.ndarray:
    """Return an output of the protocol as an array; what is null in a row is an empty text."""
    if name in ARRAYS:
        return np.asarray(getattr(answers, name))
    if datatype != "BYTES":
        column = {**_VECTORS, "class": "class_index"}.get(name, name)
        return np.asarray(getattr(answers, column))
    values = [row[name] for row in answers.rows()]
    texts = ["" if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
    return np.array(texts, dtype=object)
