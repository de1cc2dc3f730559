"""Pipelines of transformers whose answers say how sure and how new.

They are transformers' own: its preparation of inputs, its batching and its options at the call.
Each entry has the fields of the input's row (`uncertainty`, `novelty`, `decision` ...) beside the
`label` and `score` that transformers gives it; they are None when not fitted.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from ..errors import DataError, UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..registry import check_name, imported
from ..runtime.images import check_size, open_image

TASKS = ("image-classification", "text-classification", "token-classification")


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
        task: `"image-classification"`, `"text-classification"` or `"token-classification"`.
        model: An ensemble of a transformers host, its folder or its hub name.
        tokenizer, image_processor: What prepares the inputs; by default the ensemble's own.
        device: Where to run; by default where the ensemble is.
        batch_size: Inputs per forward pass, when it is called with many.

    Returns:
        A transformers pipeline; options such as `top_k` and `aggregation_strategy` go to its call.

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
    given: dict[str, Any] = {"device": ensemble.device if device is None else device}
    if batch_size is not None:
        given["batch_size"] = batch_size
    if task == "image-classification":
        given["image_processor"] = image_processor or _processor(ensemble)
    else:
        given["tokenizer"] = tokenizer if tokenizer is not None else ensemble.tokenizer
        if given["tokenizer"] is None:
            raise DataError(
                "This ensemble has no tokenizer: pass tokenizer=..., or set ensemble.tokenizer, "
                "which is saved along."
            )
    return transformers.pipeline(task, model=ensemble, pipeline_class=_classes()[task], **given)


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
        return {"logits": answer.logits, "rows": answer.rows()}

    def postprocess(self, model_outputs: dict[str, Any], **options: Any) -> Any:
        row = {k: v for k, v in _row(model_outputs).items() if k not in ("label", "class")}
        entries = super().postprocess(model_outputs, **options)  # type: ignore[misc]
        if isinstance(entries, dict):
            return entries | row
        return [entry | row for entry in entries]


class _ClassifiesImages(_Classifies):
    """Opens files as everything else here does, and bounds what the processor resizes."""

    def preprocess(self, image: Any, timeout: float | None = None) -> Any:
        from transformers.image_utils import load_image

        if isinstance(image, str):
            image = open_image(image) if os.path.isfile(image) else load_image(image, timeout)
        if hasattr(image, "convert"):
            check_size(image)
        return super().preprocess(image, timeout=timeout)  # type: ignore[misc]


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
