"""Deep Ensembles, fine-tuned from one backbone (Lakshminarayanan et al., 2017)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ...training import finetune
from .parts import MemberStack, find_classifier, first_batch
from .task import Task, baselines


@baselines.register("deep-ensemble")
def deep_ensemble(host: nn.Module, task: Task, *, fresh_head: bool = True) -> nn.Module:
    """Fine-tune the host once for each member: p(y|x) = mean_m softmax(z_m(x)).

    Lakshminarayanan et al., 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep
    Ensembles", arXiv 1612.01474. Members start from one pretrained backbone, as people do who
    cannot pretrain M times; they differ by the order of the data and by a new last layer each.

    Args:
        host: A trained classifier.
        task: Needs `train`.
        fresh_head: Initialise each member's last linear layer (where the host ends in one);
            members that also start from one head stay close to each other.
    """
    train = task.need("train")
    path = find_classifier(host, first_batch(train)) if fresh_head else None
    starts = [_with_fresh_head(host, path, seed) for seed in task.seeds]
    trained = finetune(starts, train, seed=task.seeds, **task.training())
    return MemberStack([member.model for member in trained])


def _with_fresh_head(host: nn.Module, path: str | None, seed: int) -> nn.Module:
    model = copy.deepcopy(host)
    if path is not None:
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            draws = torch.Generator().manual_seed(seed)
            noise = torch.randn(layer.weight.shape, generator=draws)
            layer.weight.copy_(0.02 * noise)
            if layer.bias is not None:
                layer.bias.zero_()
    return model
