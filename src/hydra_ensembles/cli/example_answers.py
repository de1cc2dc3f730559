"""Answers and labels of every task in a few words, for the examples on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..prediction import Prediction
    from .models import Loaded

NOTHING = "nothing"
"""What is said for no label, no entity and no answer."""


def answer_in_words(loaded: Loaded, answer: Prediction, label: Any, ids: Any) -> dict[str, Any]:
    """Return what an `Example` says of one input: the answer, its confidence, the label.

    Args:
        loaded: The model.
        answer: Its prediction for the input.
        label: What the batch says is right, or None.
        ids: Numbers of the input's tokens, or None.
    """
    from ..prediction import ClassPrediction
    from ..task_predictions import (
        MultiLabelPrediction,
        RegressionPrediction,
        SpanPrediction,
        TokenPrediction,
    )

    if isinstance(answer, TokenPrediction):
        return _tags(loaded, answer, label, ids)
    found: dict[str, Any] = {"uncertainty": float(answer.uncertainty[0]), "confidence": None}
    right: Any = None
    if isinstance(answer, MultiLabelPrediction):
        found["predicted"] = _names(loaded, answer.class_index[0])
        right = None if label is None else _names(loaded, label.nonzero().flatten().tolist())
    elif isinstance(answer, RegressionPrediction):
        values = [f"{value:.3g}" for value in answer.values[0].tolist()]
        if answer.sigma is not None:
            wide = answer.sigma[0].tolist()
            values = [f"{v} ± {w:.2g}" for v, w in zip(values, wide, strict=True)]
        found |= {"predicted": ", ".join(values), "wrong": False}
        numbers = [] if label is None else label.reshape(-1).tolist()
        right = ", ".join(f"{number:.3g}" for number in numbers)
    elif isinstance(answer, SpanPrediction):
        found["confidence"] = float(answer.confidence[0])
        found["predicted"] = _span(loaded, ids, int(answer.start[0]), int(answer.end[0]))
        if label is not None:
            start, end = (int(place) for place in label)
            right = _span(loaded, ids, start, end)
            found["wrong"] = (start, end) != (int(answer.start[0]), int(answer.end[0]))
    else:
        assert isinstance(answer, ClassPrediction)
        found["confidence"] = float(answer.confidence[0])
        found["predicted"] = loaded.class_name(int(answer.class_index[0]))
        right = None if label is None else loaded.class_name(int(label))
    return {**found, "label": right or ""}


def _names(loaded: Loaded, numbers: list[int]) -> str:
    return ", ".join(loaded.class_name(number) for number in numbers) or NOTHING


def _span(loaded: Loaded, ids: Any, start: int, end: int) -> str:
    if (start, end) == (0, 0) or start >= len(ids):
        return NOTHING
    text: str = loaded.tokenizer.decode(ids[start : end + 1])
    return text


def _tags(loaded: Loaded, answer: Any, label: Any, ids: Any) -> dict[str, Any]:
    """Return the entities of a text, and how sure its least sure token is."""
    real = answer.real[0][: len(ids)]  # an answer beside longer texts is padded
    real = real if label is None else real & (label != -100)
    places = real.nonzero().flatten().tolist()

    def entities(classes: Any) -> str:
        from ..task_predictions import entities_of

        tags = [loaded.class_name(int(classes[place])) for place in places]
        found = sorted(entities_of(tags), key=lambda entity: entity[1])
        return ", ".join(
            f"{kind} {loaded.tokenizer.decode([ids[places[i]] for i in range(first, last + 1)])!r}"
            for kind, first, last in found
        )

    return {
        "predicted": entities(answer.class_index[0]) or NOTHING,
        "confidence": float(answer.confidence[0][places].min()) if places else None,
        "uncertainty": float(answer.uncertainty[0][places].max()) if places else 0.0,
        "label": "" if label is None else entities(label) or NOTHING,
    }
