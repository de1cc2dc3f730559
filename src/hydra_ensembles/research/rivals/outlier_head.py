"""Outlier exposure after the fact: a small head that tells outliers from the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .parts import (
    Featured,
    Standardize,
    WithUncertainty,
    collect,
    find_classifier,
    first_batch,
    fit_binary,
)
from .task import Task, baselines


class OutlierHead(nn.Module):
    """A small MLP on standardised features."""

    def __init__(self, features: Tensor, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            Standardize(features),
            nn.Linear(features.shape[1], width),
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, features: Tensor, predicted: Tensor | None = None) -> Tensor:
        """Return the logit of being an outlier, `[batch]`, whatever the predicted class."""
        return self.mlp(features)[:, 0]


@baselines.register("outlier-exposure")
def outlier_exposure(
    host: nn.Module, task: Task, *, width: int = 32, steps: int = 400
) -> nn.Module:
    """Train a small head on frozen features to tell validation data from outliers.

    u(x) = MLP(features(x)), by binary cross-entropy with both kinds weighted equally. After
    Hendrycks et al., 2019, "Outlier Exposure", arXiv 1812.04606: the fair rival of a
    method that sees outliers when it chooses heads, since it is given the very same ones.
    Predictions stay the host's. Read the uncertainty with the score `energy`.

    Args:
        host: A trained classifier; features are the input of its last linear layer, else its image
            embeddings, else its logits.
        task: Needs `validation` and `ood`.
        width: Hidden units of the head.
        steps: Of its training.
    """
    validation, outliers = task.need("validation"), task.need("ood")
    if isinstance(outliers, Mapping):  # by family: all of them are outliers to this head
        outliers = [batch for family in outliers.values() for batch in family]
    copied = copy.deepcopy(host)
    featured = Featured(copied, find_classifier(copied, first_batch(validation)))
    parts = [
        collect(featured, data, name=name, labels=False, progress=task.progress)[1]
        for name, data in (("validation", validation), ("ood", outliers))
    ]
    features = torch.cat(parts)
    targets = torch.arange(len(features), device=features.device) >= len(parts[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        head = OutlierHead(parts[0], width).to(features.device)
    fit_binary(
        head,
        [features],
        targets,
        positive_weight=len(parts[0]) / len(parts[1]),
        steps=steps,
        seed=task.seed,
        progress=task.progress,
    )
    return WithUncertainty(featured, head)
