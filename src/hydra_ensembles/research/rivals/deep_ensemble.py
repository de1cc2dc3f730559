"""Deep Ensembles, fine-tuned from one backbone (Lakshminarayanan et al., 2017)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ...training import finetune
from .parts import MemberStack, find_classifier, first_batch
from .task import Task, baselines


@baselines.register("deep-ensemble")
def deep_ensemble(host: nn.Module, task: Task) -> nn.Module:
    """Fine-tune the host once for each member: p(y|x) = mean_m softmax(z_m(x)).

    Lakshminarayanan et al., 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep
    Ensembles", arXiv 1612.01474. Members start from one pretrained backbone, as people do who
    cannot pretrain M times. They differ by the order of the data and by a new last layer each, as
    members that also start from one head stay close (where the host ends in a linear layer).

    Args:
        host: A trained classifier.
        task: Needs `train`.
    """
    train = task.need("train")
    path = find_classifier(host, first_batch(train))
    starts = []
    for seed in task.seeds:
        model = copy.deepcopy(host)
        if path is not None:
            layer = model.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            draws = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                layer.weight.copy_(0.02 * torch.randn(layer.weight.shape, generator=draws))
                if layer.bias is not None:
                    layer.bias.zero_()
        starts.append(model)
    trained = finetune(starts, train, seed=task.seeds, **task.training())
    return MemberStack([member.model for member in trained])
