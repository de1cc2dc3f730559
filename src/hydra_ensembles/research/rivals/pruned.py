"""Single models with fewer heads: chosen by Taylor scores, or by the average circuit."""

from __future__ import annotations

import copy

from torch import nn

from ...criteria import score_heads
from ...heads.gates import prune_heads_
from ...search.headmap import find_circuit
from ...training import finetune
from .task import Task, baselines


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
