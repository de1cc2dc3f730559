"""Pipelines of transformers whose answers say how sure and how new.

They are transformers' own: its preparation of inputs, its batching and its options at the call.
Each entry has the fields of the input's row (`uncertainty`, `novelty`, `decision` ...) beside the
`label` and `score` that transformers gives it; they are None when not fitted. transformers 5 has no
pipeline for questions any more: ours takes and gives what that one did. Features come as the row of
the input, whose `embedding` is the vector.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..errors import DataError, UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.inputs import prepare
from ..prediction import Prediction
from ..registry import check_name, imported
from ..runtime.images import check_size, open_image
from ..task_predictions import (
    EmbeddingPrediction,
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)

TASKS = (
    "image-classification",
    "text-classification",
    "token-classification",
    "question-answering",
    "feature-extraction",
    "image-feature-extraction",
)
_ANSWERS: dict[str, tuple[type[Prediction], ...]] = {
    "token-classification": (TokenPrediction,),
    "question-answering": (SpanPrediction,),
    "feature-extraction": (EmbeddingPrediction,),
    "image-feature-extraction": (EmbeddingPrediction,),
}
"""What answers of the models of a pipeline are; of the others any that have classes or numbers."""


def pipeline(
    task: str,
    model: HydraEnsemble | str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    device: Any = None,
    batch_size: int | None = None,
) -> Any:
    """Make a pipeline of transformers whose answers say how sure and how new.

    Args:
        task: One of `TASKS`. `"text-classification"` and `"image-classification"` are for classes,
            several labels and numbers.
        model: An ensemble of a transformers host, its folder or its hub name.
        tokenizer, image_processor: What prepares the inputs; by default the ensemble's own.
        device: Where to run; by default where the ensemble is.
        batch_size: Inputs per forward pass, when it is called with many.

    Returns:
        A transformers pipeline; options such as `top_k`, `function_to_apply` and
        `aggregation_strategy` go to its call.

    Example:
        >>> classify = hydra.pipeline("text-classification", ensemble)
        >>> classify("a film to remember")
        [{'label': 'positive', 'score': 0.97, 'uncertainty': 0.03, 'novelty': 0.41, ...}]
    """
    check_name("task", task, TASKS)
    transformers = imported("transformers", "A pipeline", "transformers")
    ensemble = model if isinstance(model, HydraEnsemble) else HydraEnsemble.from_pretrained(model)
    if not isinstance(ensemble.host, transformers.PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(ensemble.host).__name__} is not a model of transformers, whose pipelines need "
            "one. Call ensemble.predict(images, paths or texts)."
        )
    own = ensemble.task.prediction
    others = tuple(kind for kinds in _ANSWERS.values() for kind in kinds)
    fits = issubclass(own, _ANSWERS[task]) if task in _ANSWERS else not issubclass(own, others)
    if not fits:
        fitting = [n for n in TASKS if n in _ANSWERS and issubclass(own, _ANSWERS[n])] or TASKS[:2]
        raise UnsupportedModelError(
            f"{type(ensemble.host).__name__} is made for {ensemble.task.title}, which the pipeline "
            f"{task!r} does not do. Take {' or '.join(map(repr, fitting))}."
        )
    given: dict[str, Any] = {"device": ensemble.device if device is None else device}
    if batch_size is not None:
        given["batch_size"] = batch_size
    if task.startswith("image"):
        given["image_processor"] = image_processor or _processor(ensemble)
    else:
        given["tokenizer"] = tokenizer if tokenizer is not None else ensemble.tokenizer
        if given["tokenizer"] is None:
            raise DataError(
                "This ensemble has no tokenizer: pass tokenizer=..., or set ensemble.tokenizer, "
                "which is saved along."
            )
    known = "feature-extraction" if task == "question-answering" else task  # gone from transformers
    return transformers.pipeline(known, model=ensemble, pipeline_class=_classes()[task], **given)


def _processor(ensemble: HydraEnsemble) -> Any:
    """Return what makes pixels: the host's processor, or our transform called like one."""
    transform = ensemble.transform
    if transform is None:
        raise DataError(
            "This ensemble has no transform: pass image_processor=..., or set "
            "ensemble.transform = hydra_ensembles.data.image_transform(processor)."
        )
    processor = getattr(transform, "processor", None)
    return processor if processor is not None else _AsProcessor(transform)


class _AsProcessor:
    """A transform of images, called as the pipelines call an image processor."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, images: Any, return_tensors: str = "pt") -> Any:
        import transformers

        return transformers.BatchFeature({"pixel_values": self.transform(images)[None]})


@cache
def _classes() -> dict[str, type]:
    import transformers

    made = (
        (_ClassifiesImages, transformers.ImageClassificationPipeline),
        (_Classifies, transformers.TextClassificationPipeline),
        (_Tags, transformers.TokenClassificationPipeline),
        (_Answers, transformers.FeatureExtractionPipeline),
        (_Embeds, transformers.FeatureExtractionPipeline),
        (_EmbedsImages, transformers.ImageFeatureExtractionPipeline),
    )
    return {
        task: type(f"Hydra{base.__name__}", (mixin, base), {})
        for task, (mixin, base) in zip(TASKS, made, strict=True)
    }


class _Classifies:
    """Adds the fields of an input's row to each of its entries, whose label is their own."""

    model: HydraEnsemble

    def _forward(self, model_inputs: Any) -> dict[str, Any]:
        answer = self.model.predict(dict(model_inputs))
        # of several labels the logit of the mean, of numbers their mean
        mean = self.model.task.mean(answer.answering_outputs)
        return {"logits": mean, "rows": answer.rows()}

    def postprocess(
        self, model_outputs: dict[str, Any], function_to_apply: Any = None, **options: Any
    ) -> Any:
        kind = self.model.task.prediction
        if function_to_apply is None:  # by the task, which a config may not say
            usual = {MultiLabelPrediction: "sigmoid", RegressionPrediction: "none"}
            function_to_apply = _function(usual.get(kind, "softmax"))
        hidden = () if kind is RegressionPrediction else ("label", "class")
        row = {k: v for k, v in _row(model_outputs).items() if k not in hidden}
        if kind is MultiLabelPrediction:
            row = {"labels": _row(model_outputs)["label"], **row}
        entries = super().postprocess(  # type: ignore[misc]
            model_outputs, function_to_apply=function_to_apply, **options
        )
        if isinstance(entries, dict):
            return entries | row
        return [entry | row for entry in entries]


def _function(name: str) -> Any:
    from transformers.pipelines.text_classification import ClassificationFunction

    return ClassificationFunction[name.upper()]


class _Rows:
    """Gives the row of an input."""

    model: HydraEnsemble

    def _forward(self, model_inputs: Any) -> dict[str, Any]:
        given = dict(model_inputs)
        texts = given.pop("texts", None)
        answer: Any = self.model.predict(given)
        if texts is not None:
            # of a batch that the pipeline joined, one list for each
            flat = [text for own in texts for text in ([own] if isinstance(own, str) else own)]
            answer = replace(answer, texts=flat)
        return {"rows": answer.rows(), **self._places(answer)}

    def _places(self, answer: Prediction) -> dict[str, Any]:
        return {}

    def postprocess(self, model_outputs: dict[str, Any], **options: Any) -> Any:
        return _row(model_outputs)


class _Embeds(_Rows):
    """Gives the row of a text, whose `embedding` is its vector."""


class _EmbedsImages(_Rows):
    """Opens files as everything else here does."""

    def preprocess(self, image: Any, timeout: float | None = None, **options: Any) -> Any:
        return super().preprocess(_opened(image, timeout), timeout=timeout, **options)  # type: ignore[misc]


class _Answers(_Rows):
    """Answers questions: `answer`, `score`, and its first and last character in the context."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if "question" in options:
            names = ("question", "context")
            inputs = ({name: options.pop(name, None) for name in names},)
        return super().__call__(*inputs, **options)  # type: ignore[misc]

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        return prepare(self.model, [inputs])

    def _places(self, answer: Prediction) -> dict[str, Any]:
        return {"offsets": answer.offsets}

    def postprocess(self, model_outputs: dict[str, Any], **options: Any) -> Any:
        row, offsets = dict(_row(model_outputs)), model_outputs["offsets"]
        first, last = row["start"], row["end"]
        if offsets is not None:
            places = torch.as_tensor(offsets).reshape(-1, 2).tolist()
            none = (first, last) == (0, 0)
            row |= {
                "start": 0 if none else places[first][0],
                "end": 0 if none else places[last][1],
            }
        return {"score": row.pop("confidence"), **row}


class _ClassifiesImages(_Classifies):
    """Opens files as everything else here does, and bounds what the processor resizes."""

    def preprocess(self, image: Any, timeout: float | None = None) -> Any:
        return super().preprocess(_opened(image, timeout), timeout=timeout)  # type: ignore[misc]


def _opened(image: Any, timeout: float | None) -> Any:
    """Open a file or an address, and bound what is resized."""
    from transformers.image_utils import load_image

    if isinstance(image, str):
        image = open_image(image) if os.path.isfile(image) else load_image(image, timeout)
    if hasattr(image, "convert"):
        check_size(image)
    return image


class _Tags:
    """Adds to each entity the uncertainty of its least sure token, and the novelty of its text."""

    model: HydraEnsemble
    tokenizer: Any

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        names = self.tokenizer.model_input_names
        inputs = {name: value for name, value in model_inputs.items() if name in names}
        answer = self.model.predict(inputs)
        rest = {name: value for name, value in model_inputs.items() if name != "logits"}
        return {"logits": answer.logits, "rows": answer.rows(), **rest}

    def postprocess(self, all_outputs: list[dict[str, Any]], **options: Any) -> Any:
        # first, for transformers shifts the offsets of split words in place
        tokens = [token for outputs in all_outputs for token in _tokens(outputs)]
        entities = super().postprocess(all_outputs, **options)  # type: ignore[misc]
        for entity in entities:
            unsure = [value for place, *_, value in tokens if place == entity.get("index")]
            if "index" not in entity:
                if entity["start"] is None:
                    raise DataError(
                        "The tokenizer does not say where its tokens are in the text, which groups "
                        'need: take a fast tokenizer, or aggregation_strategy="none".'
                    )
                first, last = entity["start"], entity["end"]
                unsure = [value for _, a, b, value in tokens if a < last and b > first]
            # novelty and decision of a text are those of its newest piece
            newest = max(map(_row, all_outputs), key=lambda row: row["novelty"] or 0.0)
            for name in ("novelty", "novelty_score", "decision", "why"):
                entity[name] = None if isinstance(newest[name], list) else newest[name]
            entity["uncertainty"] = max(unsure)
        return entities


def _row(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an input; transformers unpacks lists only when it cuts a batch."""
    rows = outputs["rows"]
    return rows[0] if isinstance(rows, list) else rows


def _tokens(outputs: dict[str, Any]) -> list[tuple[int, int, int, float]]:
    """Return place, start, end and uncertainty of every real token of a piece of text."""
    uncertainty = _row(outputs)["uncertainty"]
    special = outputs["special_tokens_mask"][0].tolist()
    offsets = outputs.get("offset_mapping")
    spans = [(0, 0)] * len(special) if offsets is None else torch.as_tensor(offsets[0]).tolist()
    words, places = outputs.get("word_ids"), outputs.get("word_to_chars_map")
    tokens = []
    for place, (start, end) in enumerate(spans):
        if special[place]:
            continue
        word = None if words is None else words[place]
        shift = 0 if word is None or places is None else places[word][0]
        tokens.append((place, start + shift, end + shift, uncertainty[place]))
    return tokens
