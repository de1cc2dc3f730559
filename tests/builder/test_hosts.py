"""`build` takes hosts that run their own blocks, whatever those look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ensembles import build, verify
from tests import zoo
from tests.costs.test_formula import deberta, longformer, swin


def known(make: Callable[[], nn.Module]) -> list[dict[str, Any] | tuple[Any, ...]]:
    """Return labelled batches; texts of one batch are shorter than those of the next."""
    if make is swin:
        draws = torch.Generator().manual_seed(0)
        return [(torch.randn(12, 3, 32, 32, generator=draws), torch.arange(12) % 5)] * 4
    data: list[Any] = []
    for seed, length in enumerate((6, 7, 5, 7)):
        batch = zoo.batch("bert", size=12, seed=seed)
        texts = {name: value[:, :length] for name, value in batch.items()}
        data.append({**texts, "labels": torch.arange(12) % 5})
    return data


@pytest.mark.parametrize("make", [deberta, longformer, swin])
def test_a_host_that_runs_its_own_blocks_is_built(make: Callable[[], nn.Module]) -> None:
    data = known(make)
    model = zoo.seeded(make)
    ensemble = build(model, data, members=2, max_cost=None, progress=False)
    assert ensemble.engine == "host"
    verify(ensemble, data[0])
    answer = ensemble.predict(data[0])
    assert answer.novelty is not None and answer.novelty.shape == (12,)
