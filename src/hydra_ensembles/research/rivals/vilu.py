"""ViLU: predict a zero-shot classifier's failures from image and texts (Lafon et al., 2025)."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from ...errors import DataError, UnsupportedModelError
from .parts import Featured, WithUncertainty, collect, fit_binary
from .task import Task, baselines


class FailureHead(nn.Module):
    """An image attends to the class texts; an MLP reads image, predicted text and what it saw."""

    def __init__(self, texts: Tensor, *, hidden: int) -> None:
        super().__init__()
        width = texts.shape[1]
        self.texts: Tensor
        self.register_buffer("texts", texts.detach().clone())
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(3 * width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden // 2),
            nn.GELU(),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, images: Tensor, predicted: Tensor) -> Tensor:
        """Return the logit of failure, `[batch]`.

        Args:
            images: Normalised embeddings `[batch, width]`.
            predicted: Predicted classes `[batch]`.
        """
        texts = self.texts
        scale = math.sqrt(texts.shape[1])
        weights = (self.query(images) @ self.key(texts).t() / scale).softmax(-1)
        context = weights @ self.value(texts)
        return self.mlp(torch.cat([images, texts[predicted], context], -1))[:, 0]


@baselines.register("vilu")
def vilu(host: nn.Module, task: Task, *, hidden: int = 256, steps: int = 600) -> nn.Module:
    """Train a small cross-attention head to predict when a zero-shot classifier is wrong.

    u(x) = MLP([v, t_predicted, softmax(q(v) k(T)^T / sqrt(d)) v(T)]) with image embedding v and
    class texts T, by binary cross-entropy that weighs failures by log(1 + right / wrong)
    (Lafon et al., 2025, "ViLU", arXiv 2507.07620). Ours, after the paper's description: sizes,
    optimiser and the exact weight are our choice. Predictions stay the host's; read the
    uncertainty with the score `energy`.

    Args:
        host: A `ZeroShotClassifier` (anything with `text_embeddings` that answers with
            `image_embeds`).
        task: Needs `train`, on which the host makes some mistakes.
        hidden: Units of the first hidden layer.
        steps: Of the training.
    """
    texts = getattr(host, "text_embeddings", None)
    if not isinstance(texts, Tensor):
        raise UnsupportedModelError(
            f"ViLU compares an image with texts, but {type(host).__name__} has no text_embeddings. "
            "Wrap a dual encoder in ZeroShotClassifier."
        )
    featured = Featured(copy.deepcopy(host), None)
    logits, images, labels = collect(
        featured, task.need("train"), name="train", labels=True, progress=task.progress
    )
    assert labels is not None
    predicted = logits.argmax(-1)
    wrong = predicted != labels
    failures = int(wrong.sum())
    if not 0 < failures < len(wrong):
        raise DataError(
            f"The host is wrong on {failures} of {len(wrong)} training examples: a head that tells "
            "right from wrong needs both. Give other data."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        head = FailureHead(texts, hidden=hidden).to(images.device)
    fit_binary(
        head,
        [images, predicted],
        wrong,
        positive_weight=math.log1p((len(wrong) - failures) / failures),
        steps=steps,
        seed=task.seed,
        progress=task.progress,
    )
    return WithUncertainty(featured, head)
