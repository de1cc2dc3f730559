"""What a model returns: classes, an embedding, or something that members cannot average."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_CLASSIFIERS = ("classifier", "score", "classification_head")

NEXT_TOKENS = (
    "fused, a causal language model scores the next token: forward (also with labels=) and predict "
    "give the members' mean at every token, member_logits each member; PromptClassifier makes it "
    "a classifier. It keeps no cache, and generate() works on one member only: "
    "ensemble.member(m).generate(...)"
)
"""What works with a fused causal language model, and what does not."""

TAGGING = "token classification (tagging)"
OTHER_TASKS = {
    "QuestionAnswering": "question answering",
    "Segmentation": "segmentation",
    "ObjectDetection": "object detection",
    "ForTokenClassification": TAGGING,
    "ForCTC": "speech recognition",
    "SpeechSeq2Seq": "speech recognition",
    "ForConditionalGeneration": "generation",
    "DepthEstimation": "depth estimation",
}
"""What the name of a class of transformers says that it is made for."""


def named_task(built: str, config: Any) -> str | None:
    """Name the task of a model by its class and config, None if its outputs are classes.

    Args:
        built: Name of its class, or of the classes that its config lists.
        config: Its config of transformers, or None.
    """
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return "multi-label classification"
    one = getattr(config, "num_labels", 2) == 1
    if "Classification" in built and (problem == "regression" or one):
        return "regression"
    return next((task for part, task in OTHER_TASKS.items() if part in built), None)


def other_task(model: Any) -> str | None:
    """Name a model's task if its outputs are not class probabilities, which members average."""
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem in ("multi_label_classification", "regression"):
        return str(problem)
    if getattr(config, "num_labels", 2) == 1 and any(hasattr(model, n) for n in _CLASSIFIERS):
        return "regression (one label)"
    return None


def is_language_model(model: Any) -> bool:
    """Return whether a model's classes are the tokens of its vocabulary, as transformers says."""
    output = getattr(model, "get_output_embeddings", None)
    return output is not None and output() is not None


def predicts_next_token(model: Any) -> bool:
    """Return whether a model is a causal language model: each token's logits are of the next."""
    if not is_language_model(model) or getattr(model.config, "is_encoder_decoder", False):
        return False
    return bool(model.can_generate())


def gives_classes(model: Any, output: Any) -> bool:
    """Return whether a model's output holds class logits, not an embedding or hidden states.

    Hugging Face says so by the field `logits`. A bare tensor [batch, n] is logits when n is the
    model's number of classes, or when the model does not say that it projects (open_clip's towers).
    """
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        output, classes = output[0], getattr(getattr(model, "config", None), "num_labels", None)
        return classes == output.shape[-1]
    if not isinstance(output, Tensor):
        logits = (
            output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
        )
        return isinstance(logits, Tensor)
    if output.dim() != 2:
        return False
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int):
        return classes == output.shape[-1]
    return not hasattr(model, "output_dim")
