"""BatchEnsemble: one weight matrix, a rank-one factor for each member (Wen et al., 2020)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...registry import imported
from ...training import finetune
from .parts import Folded, block_linears, find_classifier, first_batch, replace_
from .task import Task, baselines


class TokenwiseBatchLinear(nn.Module):
    """torch-uncertainty's `BatchLinear`, which takes `[rows, width]`, over tokens too."""

    def __init__(self, linear: nn.Linear, members: int, *, spread: float, draws: Any) -> None:
        super().__init__()
        layers = imported("torch_uncertainty.layers", "This rival", "rivals")
        self.layer = layers.BatchLinear.from_linear(linear, num_estimators=members)
        with torch.no_grad():
            self.layer.linear.weight.copy_(linear.weight)
            for factor in (self.layer.r_group, self.layer.s_group):
                noise = torch.randn(factor.shape, generator=draws)
                factor.copy_(1 + spread * noise)
            if linear.bias is not None:
                self.layer.bias.copy_(linear.bias.expand(members, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[member * batch, ..., in]` to `[member * batch, ..., out]`."""
        # rows of one member stay together when tokens are folded into them
        return self.layer(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


@baselines.register("batch-ensemble")
def batch_ensemble(
    host: nn.Module, task: Task, *, spread: float = 0.1, train: bool = True
) -> nn.Module:
    """Give every member rank-one factors of the host's weights, and fine-tune all together.

    W_m = W * (s_m r_m^T), y_m = ((x * r_m) W^T) * s_m + b_m, for every linear layer of the blocks
    and the classifier (Wen et al., 2020, "BatchEnsemble", arXiv 2002.06715). W and b_m start from
    the host, the factors from N(1, spread): the published spread of 0.5 is for training from
    scratch and would undo what the host has learned. With unit factors it *is* the host.

    Args:
        host: A trained classifier.
        task: Needs `train`.
        spread: Standard deviation of the factors at the start.
        train: Whether to fine-tune at all.
    """
    data = task.need("train")
    model = copy.deepcopy(host)
    classifier = find_classifier(model, first_batch(data))
    paths = block_linears(model) + ([] if classifier is None else [classifier])
    draws = torch.Generator().manual_seed(task.seed)
    for path in dict.fromkeys(paths):
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        layer = TokenwiseBatchLinear(linear, task.members, spread=spread, draws=draws)
        replace_(model, path, layer)
    folded = Folded(model, task.members)
    if not train:
        return folded
    return finetune(folded, data, seed=task.seed, **task.training())[0].model
