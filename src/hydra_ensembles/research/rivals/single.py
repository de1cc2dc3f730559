"""One model: the host as it is, with a temperature (Guo et al., 2017), and with fewer heads."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ...criteria import score_heads
from ...data.model_runs import collect_logits, member_logits_of
from ...heads.gates import prune_heads_
from ...search.headmap import find_circuit
from ...training import finetune
from ...uncertainty import fit_temperature
from .task import Task, baselines


@baselines.register("single")
def single(host: nn.Module, task: Task) -> nn.Module:
    """Return a copy of the host: what everything else is measured against."""
    return copy.deepcopy(host)


class Tempered(nn.Module):
    """A host whose logits are divided by a temperature."""

    def __init__(self, host: nn.Module, temperature: float) -> None:
        super().__init__()
        self.host = host
        self.temperature = temperature

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with z / T, `[batch, member, class]`."""
        return member_logits_of(self.host(*args, **kwargs)) / self.temperature


@baselines.register("temperature")
def temperature(host: nn.Module, task: Task) -> nn.Module:
    """Divide logits by the temperature that is best for the validation data's NLL.

    argmin_T mean_x -log softmax(z(x) / T)_y: accuracy stays, calibration changes (Guo et al., 2017,
    "On Calibration of Modern Neural Networks", arXiv 1706.04599).
    """
    logits, labels = collect_logits(
        host,
        task.need("validation"),
        name="validation",
        need_labels=True,
        progress=task.progress,
    )
    assert labels is not None  # need_labels
    return Tempered(copy.deepcopy(host), fit_temperature(logits, labels))


@baselines.register("taylor-single")
def taylor_single(host: nn.Module, task: Task, *, keep: float = 0.5) -> nn.Module:
    """Remove each layer's heads with the lowest first-order score, then fine-tune.

    |E_x dL/dg_h| at gate g = 1 (Molchanov et al., 2017); `Taylor` of the Hydra paper.

    Args:
        host: A trained classifier.
        task: Needs `train`.
        keep: Share of each layer's heads that stays.
    """
    train = task.need("train")
    scores = score_heads(host, train, criterion="taylor", progress=task.progress)
    model = prune_heads_(copy.deepcopy(host), scores.top_k(keep))
    return finetune(model, train, seed=task.seed, **task.training())[0].model


@baselines.register("circavg-single")
def circavg_single(
    host: nn.Module, task: Task, *, keep: float = 0.5, layers: list[int] | None = None
) -> nn.Module:
    """Keep the circuit that serves all objectives on average; nothing is trained.

    HeadMap on the mean of the objectives' z-scored harms; `CircAvg` of the Hydra paper.

    Args:
        host: A trained classifier.
        task: Needs `validation`; uses `ood` where given, proxies made of `validation` otherwise.
        keep: Share of each searched layer's heads that stays.
        layers: Layers to search; the others keep all heads.
    """
    mask = find_circuit(
        host,
        id=task.need("validation"),
        ood=task.ood,
        objective="average",
        keep=keep,
        layers=layers,
        folder=task.folder,
        progress=task.progress,
    )
    return prune_heads_(copy.deepcopy(host), mask)
