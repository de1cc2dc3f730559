"""One class per token: tagging, filling masked tokens, and predicting the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..prediction import Prediction
from ..task_predictions import TokenPrediction
from ..uncertainty import as_member_logits, predict_from_logits
from .multi_class import MultiClass
from .task import IGNORED, Facts, Task, tasks

_TAGGERS = ("ForTokenClassification", "ForAudioFrameClassification", "ForMaskedLM")


NEXT_TOKENS = (
    "fused, a causal language model scores the next token: forward (also with labels=) and predict "
    "give the members' mean at every token, member_logits each member; PromptClassifier makes it "
    "a classifier. It keeps no cache, and generate() works on one member only: "
    "ensemble.member(m).generate(...)"
)
"""What works with a fused causal language model, and what does not."""


def is_language_model(model: object) -> bool:
    """Return whether a model's classes are the tokens of its vocabulary, as transformers says."""
    output = getattr(model, "get_output_embeddings", None)
    return output is not None and output() is not None


def predicts_next_token(model: object) -> bool:
    """Return whether a model is a causal language model: each token's logits are of the next."""
    config = getattr(model, "config", None)
    if not is_language_model(model) or getattr(config, "is_encoder_decoder", False):
        return False
    return bool(model.can_generate())  # type: ignore[attr-defined]


@tasks.register("token-classification")
@dataclass(frozen=True)
class Tokens(MultiClass):
    """Every token is an example of its own; labels of -100 do not count."""

    name: ClassVar[str] = "token-classification"
    title: ClassVar[str] = "token classification"
    axes: ClassVar[int] = 3
    prediction: ClassVar[type[Prediction]] = TokenPrediction
    by_token: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    sets: ClassVar[tuple[str, ...]] = ("lac", "aps")

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task of a tagger or a masked language model, by the name of its class."""
        return cls() if facts.name.endswith(_TAGGERS) else None

    def answer(  # type: ignore[override]
        self, outputs: Tensor, /, *, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> Prediction:
        """Turn member logits `[batch, member, token, class]` into a class per token."""
        answer, read = predict_from_logits(outputs, **options), inputs or {}
        shape = answer.class_index.shape
        real = torch.ones(shape, dtype=torch.bool, device=outputs.device)
        mask, which = read.get("attention_mask"), read.get("sequence_ids")
        for given, kept in ((mask, 1), (which, 0)):  # special tokens belong to no text: -1
            if isinstance(given, Tensor) and given.shape == shape:
                real &= given.to(outputs.device) >= kept
        return TokenPrediction(
            **{field.name: getattr(answer, field.name) for field in fields(answer)},
            real=real,
            words=read.get("word_ids"),
            offsets=read.get("offset_mapping"),
            texts=read.get("texts"),
        )

    def member_outputs(self, outputs: Tensor, /) -> Tensor:
        """Return logits with a member axis: one model is one member."""
        return as_member_logits(outputs[:, None] if outputs.ndim == self.axes else outputs)

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return whole class numbers of tokens, `[batch, token]` or `[example]`; -100 stays."""
        counted = labels[labels != IGNORED].detach().cpu() if labels.ndim == 2 else labels
        checked = super().check_labels(counted, where, size=size)
        return labels.detach().cpu().long() if labels.ndim == 2 else checked

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy over each text's labelled, real tokens, `[batch]`."""
        labels = labels.to(outputs.device)
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(~mask.to(labels.device).bool(), IGNORED)
        losses = F.cross_entropy(
            outputs.float().transpose(1, 2), labels.long(), reduction="none", ignore_index=IGNORED
        )
        return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)


@tasks.register("next-token")
@dataclass(frozen=True)
class NextToken(Tokens):
    """A causal language model: the logits at a token are of the next one."""

    name: ClassVar[str] = "next-token"
    title: ClassVar[str] = "predicting the next token"
    sets: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task of a causal language model."""
        return cls() if predicts_next_token(facts.model) else None

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of each text's next tokens, `[batch]`."""
        shifted = mask[:, 1:] if isinstance(mask, Tensor) else None
        return super().losses(outputs[:, :-1], labels[:, 1:], shifted)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        return super().loss(outputs[:, :-1], labels[:, 1:])
