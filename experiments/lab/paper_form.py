"""The paper's own form of Hydra: members part early, are tuned one by one, and their MLPs merged.

    paper-form       three members of the host of seed 0. `criterion`: `taylor` (members differ by
                     the calibration examples that score them), `circuits` (one objective each)
                     or `none` (one member with all heads);
                     `from`: the first block in which members differ; `merged: false` keeps each
                     member's own MLPs; `tuned: false` trains nothing; `only` picks one member: the
                     single pruned model

Rows that differ in `merged` or `only` share their trained members. The papers do not say how many
heads members keep: half of each block here.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.data.splits import sample
from hydra_ensembles.research import MemberStack
from hydra_ensembles.training import Settings

from .answers import Answers, Store
from .methods import answers_of_model, methods
from .tasks import Task

KEEP = 0.5
SCORED = 200
"""Calibration examples that score the heads of one member by Taylor."""

OBJECTIVES = ("id-loss", "ood-auroc", "average")


@methods.register("paper-form")
def paper_form(store: Store, row: Mapping[str, Any], draw: int) -> Answers:
    """Ask the members, merged into one model or side by side."""
    members = tuned(store, row, draw) if row.get("tuned", True) else pruned(store, row, draw)
    if "only" in row:
        model: nn.Module = members[row["only"]]
    else:
        model = hydra.fuse(members) if row.get("merged", True) else MemberStack(members)
    return answers_of_model(store.task, model.eval(), row)


def masks(store: Store, row: Mapping[str, Any], draw: int) -> list[HeadMask]:
    """Choose each member's heads from block `from` on; below it all heads are kept."""
    path = store.place(f"masks of {row['criterion']}", draw) / "masks.json"
    task, host = store.task, store.task.host(0)
    full = HeadMask.full(host)
    if row["criterion"] == "none":
        return [full]
    if path.exists():
        kept = [HeadMask.from_json(line) for line in path.read_text().splitlines()]
    else:
        kept = by_taylor(task, host, draw) if row["criterion"] == "taylor" else circuits(task, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(" ".join(mask.to_json().split()) for mask in kept))
    for block in range(row.get("from", 0)):
        kept = [mask.with_layer(block, full[block]) for mask in kept]
    return kept


def by_taylor(task: Task, host: nn.Module, draw: int) -> list[HeadMask]:
    """Score the heads on three draws of calibration examples."""
    return [
        hydra.score_heads(
            host,
            list(sample(task.calibration, SCORED, seed=10 * draw + member)),
            criterion="taylor",
            progress=False,
        ).top_k(KEEP)
        for member in range(3)
    ]


def circuits(task: Task, host: nn.Module) -> list[HeadMask]:
    """Search one circuit per objective on calibration data and seen outliers."""
    known = list(sample(task.calibration, 300, seed=0))
    return [
        hydra.find_circuit(
            host,
            id=known,
            ood=task.outliers,
            objective=objective,
            keep=KEEP,
            condition="keep",
            progress=False,
        )
        for objective in OBJECTIVES
    ]


def pruned(store: Store, row: Mapping[str, Any], draw: int) -> list[nn.Module]:
    """Cut a copy of the host for each member."""
    host = store.task.host(0)
    return [hydra.prune_heads_(deepcopy(host), mask) for mask in masks(store, row, draw)]


def tuned(store: Store, row: Mapping[str, Any], draw: int) -> list[nn.Module]:
    """Fine-tune each member by itself from its first own block on; finished ones are read."""
    start = row.get("from", 0)
    frozen = ("bert.embeddings", *(f"encoder.layer.{block}." for block in range(start)))
    folder = store.place(f"members {row['criterion']} from {start}", draw)
    found = hydra.finetune(
        pruned(store, row, draw),
        store.task.training("train", row.get("count")),
        settings=Settings(mixed_precision="bf16"),
        epochs=1,
        learning_rate=row.get("learning_rate", 3e-5),
        seed=10 * draw,
        parameters=lambda name, _: not any(part in name for part in frozen),
        folder=folder,
        progress=False,
    )
    return [member.model.eval() for member in found]
