"""Our own: members by Taylor and fine-tuning, by circuits, and by selection."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from ..circuits.headmap import find_circuit
from ..criteria import score_heads
from ..data.splits import sample
from ..ensemble import fuse
from ..heads import prune_heads_
from ..training import finetune
from .task import Task, baselines

OBJECTIVES = ("id-loss", "ood-auroc", "average", "ece", "nll-shift")


@baselines.register("hydra-taylor")
def hydra_taylor(
    host: nn.Module, task: Task, *, keep: float | Sequence[float] = 0.5, calibration: int = 256
) -> nn.Module:
    """Prune each member by Taylor scores of its own calibration subset, fine-tune, fuse.

    The MLPs are merged: W = mean_m W_m (Hydra Ensembles, arXiv 2510.18358). Members are trained
    from the first layer on, so that no trunk is shared and every member's tokens pass the MLPs.

    Args:
        host: A trained classifier.
        task: Needs `train`.
        keep: Share of each layer's heads that stays; one number, or one for each member.
        calibration: Examples that each member's scores are made of, drawn with its seed.
    """
    train = task.need("train")
    shares = [keep] * task.members if isinstance(keep, (int, float)) else list(keep)
    if len(shares) != task.members:
        raise ValueError(f"{len(shares)} shares to keep for {task.members} members.")
    starts = []
    for seed, share in zip(task.seeds, shares, strict=True):
        subset = sample(train, calibration, seed=seed)
        scores = score_heads(host, subset, criterion="taylor", progress=task.progress)
        starts.append(prune_heads_(copy.deepcopy(host), scores.top_k(share)))
    trained = finetune(starts, train, seed=task.seeds, **task.training())
    return fuse([member.model for member in trained])


@baselines.register("hydra-circuit")
def hydra_circuit(
    host: nn.Module,
    task: Task,
    *,
    keep: float = 0.5,
    layers: list[int] | None = None,
    objectives: Sequence[str] = OBJECTIVES,
) -> nn.Module:
    """Give each member the circuit of its own objective; nothing is trained.

    Members in order: `id-loss`, `ood-auroc`, `average`, then `ece` and `nll-shift` (Hydra
    Ensembles, arXiv 2510.18358; which objectives the authors took is not known).

    Args:
        host: A trained classifier.
        task: Needs `validation`; uses `ood` where given, proxies made of `validation` otherwise.
        keep: Share of each searched layer's heads that stays.
        layers: Layers to search; the others are the shared trunk and keep all heads.
        objectives: One for each member.
    """
    if task.members > len(objectives):
        raise ValueError(
            f"{task.members} members but {len(objectives)} objectives ({', '.join(objectives)}): "
            "give one for each."
        )
    validation = task.need("validation")
    masks = [
        find_circuit(
            host,
            id=validation,
            ood=task.ood,
            objective=objective,
            keep=keep,
            layers=layers,
            folder=None if task.folder is None else task.folder / objective,
            progress=task.progress,
        )
        for objective in objectives[: task.members]
    ]
    return fuse(copy.deepcopy(host), masks)
