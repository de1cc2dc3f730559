"""Vectors of inputs: the members' embeddings are averaged; nothing is labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedModelError
from ..prediction import Prediction
from ..registry import Registry, check_name
from ..task_predictions import EmbeddingPrediction
from ..uncertainty import Score
from .task import Facts, Task, tasks

Pooling = Literal["pooler", "first", "mean"]
_NO_LABELS = "{} has no classes to label: an embedding is not right or wrong."

embedding_scores: Registry[Score] = Registry("score of embeddings")
"""Uncertainty scores by name: functions of embeddings `[batch, member, width]` to `[batch]`."""


@embedding_scores.register("spread")
def spread(members: Tensor) -> Tensor:
    """Return the members' mean cosine distance to their mean direction, `[batch]`; 0 for one."""
    directions = F.normalize(members, dim=-1)
    middle = F.normalize(directions.mean(1, keepdim=True), dim=-1)
    return (1 - (directions * middle).sum(-1)).mean(1).clamp_min(0.0)


@tasks.register("embedding")
@dataclass(frozen=True)
class Embedding(Task):
    """Members' vectors are averaged, token by token; `pooling` makes one vector per input.

    A member gives the last hidden states, and the pooled output as one more row if there is one.

    Attributes:
        pooling: `"pooler"`, the host's pooled output; `"first"` token; or `"mean"` of real tokens.
        pooler: Whether the host gives a pooled output.
    """

    name: ClassVar[str] = "embedding"
    title: ClassVar[str] = "embeddings"
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("image_embeds",),
        ("text_embeds",),
        ("last_hidden_state", "pooler_output"),
        ("last_hidden_state",),
        ("pooler_output",),
    )
    axes: ClassVar[int] = 3
    prediction: ClassVar[type[Prediction]] = EmbeddingPrediction
    scores: ClassVar[Registry[Score]] = embedding_scores
    default_score: ClassVar[str] = "spread"
    reads_inputs: ClassVar[bool] = True

    pooling: Pooling = "mean"
    pooler: bool = False

    def __post_init__(self) -> None:
        check_name("pooling", self.pooling, ("pooler", "first", "mean"))

    @classmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task of a base model of transformers, and of a tower without a classifier."""
        model, name = facts.model, facts.name
        pooler = getattr(model, "pooler", None) is not None
        if facts.config is not None and hasattr(facts.config, "model_type"):
            base = name.endswith("Model") and "LMHead" not in name
            if base or name.endswith(("ModelWithProjection", "Encoder")):
                return cls("pooler" if pooler else "mean", pooler)
            return None
        classes = getattr(model, "num_classes", None)
        without = classes == 0 if isinstance(classes, int) else hasattr(model, "output_dim")
        return cls() if without else None

    def answer(
        self,
        outputs: Tensor,
        /,
        *,
        score: str | Score = "spread",
        temperature: float | Tensor | None = None,
        member_temperatures: Sequence[float] | Tensor | None = None,
        logit_scale: float | Tensor | None = None,
        class_names: Sequence[str] | None = None,
        student_logits: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Prediction:
        """Turn the members' states into one embedding per input and its spread."""
        members = self.pooled(outputs, (inputs or {}).get("attention_mask")).float()
        return EmbeddingPrediction(
            embedding=members.mean(1),
            spread=members.std(1, correction=0),
            uncertainty=self.score(members, score),
            member_embeddings=members,
            score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
        )

    def pooled(self, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """Return one vector per input and member, `[batch, member, width]`."""
        if outputs.ndim == 3:  # a tower that projects gives one vector
            return outputs
        if self.pooling == "pooler":
            return outputs[:, :, -1]
        states = outputs[:, :, :-1] if self.pooler else outputs
        if self.pooling == "first":
            return states[:, :, 0]
        if mask is None or mask.shape[-1] != states.shape[2]:
            return states.mean(2)
        weight = mask.to(states)[:, None, :, None]
        return (states * weight).sum(2) / weight.sum(2).clamp_min(1)

    def examples(
        self, outputs: Tensor, labels: Tensor | None, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return one embedding per input and member, without labels."""
        return self.pooled(outputs, inputs.get("attention_mask")), None

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the members' mean, `[batch, ...]`."""
        return outputs.mean(1)

    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the squared distance to other embeddings, mean over their numbers, `[batch]`."""
        losses = F.mse_loss(outputs.float(), labels.to(outputs).float(), reduction="none")
        return losses.flatten(1).mean(1)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Refuse: an encoder of transformers has no loss."""
        raise UnsupportedModelError(_NO_LABELS.format("An encoder"))

    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Refuse labels: nothing is learnt or measured from them."""
        raise UnsupportedModelError(_NO_LABELS.format(f"The model of {where}"))
