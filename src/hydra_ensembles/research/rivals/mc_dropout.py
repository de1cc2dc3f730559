"""Monte-Carlo dropout: dropout that stays on when predicting (Gal & Ghahramani, 2016)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...hosts import host_model
from .parts import Folded, replace_
from .task import Task, baselines


class AlwaysDropout(nn.Module):
    """Dropout in training and in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of the values, scale the rest by 1 / (1 - rate)."""
        return F.dropout(x, self.rate, training=True)


class MCDropout(Folded):
    """A host whose draws of dropout are its members; the same batch gets the same draws."""

    def __init__(self, host: nn.Module, members: int, seed: int) -> None:
        super().__init__(host, members)
        self.seed = seed

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with one draw per member, `[batch, member, ...]`."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed)
            return super().forward(*args, **kwargs)


@baselines.register("mc-dropout")
def mc_dropout(host: nn.Module, task: Task, *, rate: float | None = None) -> nn.Module:
    """Predict with dropout on, once for each member: p(y|x) = mean_m softmax(z(x; dropout_m)).

    Gal & Ghahramani, 2016, "Dropout as a Bayesian Approximation", arXiv 1506.02142. Nothing is
    trained. A host that has dropout modules keeps their places; one without (many pretrained vision
    transformers) gets dropout of 0.1 on the outputs of attention and MLP, which its training has
    not seen.

    Args:
        host: A trained classifier.
        task: Uses `members` and `seed`.
        rate: Of the dropout; by default the host's own where it has any, else 0.1.
    """
    if rate is not None and not 0 < rate < 1:
        raise ValueError(f"rate={rate}: expected a share between 0 and 1, both excluded.")
    model = copy.deepcopy(host)
    dropouts = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    for name, module in dropouts:
        replace_(model, name, AlwaysDropout(module.p if rate is None else rate))
    if not dropouts:
        _add_dropout_(model, 0.1 if rate is None else rate)
    return MCDropout(model, task.members, task.seed)


def _add_dropout_(model: nn.Module, rate: float) -> None:
    """Drop values of every attention's output projection and every MLP's last linear."""
    drop = AlwaysDropout(rate)
    for block in host_model(model).blocks:
        if not block.mlp_names:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no dropout, and block {block.index} has no MLP to "
                "put one behind. Give the model nn.Dropout modules."
            )
        linears = [
            module
            for path in block.mlp_names
            for module in block.module.get_submodule(path).modules()
            if isinstance(module, nn.Linear)
        ]
        for module in (block.attention.output, linears[-1]):
            module.register_forward_hook(lambda _, inputs, output: drop(output))
