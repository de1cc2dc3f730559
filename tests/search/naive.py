"""HeadMap as published, one full pass a head: what the fast search must agree with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.data.batches import split_batch
from hydra_ensembles.data.model_runs import call_model
from hydra_ensembles.heads.gates import gate
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts import main_output
from hydra_ensembles.search.objectives import Objective
from hydra_ensembles.search.trunk_cache import Outputs


class Sets:
    """Data by name, hashable by identity."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


@lru_cache(maxsize=512)  # objectives read the same passes
def outputs(host: Any, mask: HeadMask, sets: Sets) -> Outputs:
    """Run the whole model over all data with some heads off."""
    logits, labels = {}, {}
    with torch.no_grad(), gate(host, mask):
        for name, data in sets.data.items():
            logits[name] = torch.cat([main_output(call_model(host.model, b)) for b in data])[
                :, None
            ]
            if name in ("id", "shift"):
                labels[name] = torch.cat([split_batch(b)[2] for b in data])
    return Outputs(logits, labels)


def naive_headmap(
    host: Any, sets: Sets, objective: Objective, keep: list[int], condition: str
) -> tuple[HeadMask, list[Tensor]]:
    rows = list(HeadMask.full(host))  # what is on while a layer is scored
    selected, effects = [], []
    for layer, heads in enumerate(host.head_counts):
        base = objective.value(outputs(host, HeadMask(rows), sets))
        harm = []
        for head in range(heads):
            off = HeadMask(rows).with_layer(layer, torch.arange(heads) != head)
            harm.append(objective.value(outputs(host, off, sets)) - base)
        effects.append(torch.tensor(harm, dtype=torch.float64))
        order = torch.sort(effects[-1], descending=True, stable=True).indices[: keep[layer]]
        kept = torch.zeros(heads, dtype=torch.bool)
        kept[order] = True
        selected.append(kept)
        if condition != "none":
            rows[layer] = ~kept if condition == "knockout" else kept
    return HeadMask(selected), effects
