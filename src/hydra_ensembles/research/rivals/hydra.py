"""Our own: members by Taylor and fine-tuning, by circuits, and by selection."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from ...builder import build
from ...builder.methods import Circuits, Select
from ...criteria import score_heads
from ...data.splits import sample
from ...fusion.fuse_members import fuse
from ...heads.gates import prune_heads_
from ...training import finetune
from .task import Task, baselines


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
    host: nn.Module, task: Task, *, keep: float | None = None, max_cost: float | None = 1.07
) -> nn.Module:
    """Give each member the circuit of its own objective; nothing is trained.

    HeadMap with `id-loss`, `ood-auroc`, `average` (then `ece`, `nll-shift`) as objectives (Hydra
    Ensembles, arXiv 2510.18358; which ones the authors took is not known), through `build`.

    Args:
        host: A trained classifier.
        task: Needs `validation`; `ood` is joined to proxies made of `validation`.
        keep: Share of a branched layer's heads that stays; by default what the budget allows.
        max_cost: Bound on counted multiply-adds relative to the host; None for none.
    """
    return _built(host, task, method=Circuits(keep=keep), max_cost=max_cost)


@baselines.register("hydra-select")
def hydra_select(host: nn.Module, task: Task, *, max_cost: float | None = 1.07) -> nn.Module:
    """Choose members by the ensemble's own figures on validation data; nothing is trained.

    Args:
        host: A trained classifier.
        task: Needs `validation`; `ood` is joined to proxies made of `validation`.
        max_cost: Bound on counted multiply-adds relative to the host; None for none.
    """
    return _built(host, task, method=Select(), max_cost=max_cost)


def _built(
    host: nn.Module,
    task: Task,
    *,
    method: Circuits | Select,
    max_cost: float | None,
) -> nn.Module:
    return build(
        copy.deepcopy(host),
        task.need("validation"),
        ood="auto" if task.ood is None else task.ood,
        method=method,
        members=task.members,
        max_cost=max_cost,
        seed=task.seed,
        folder=task.folder,
        progress=task.progress,
    )
