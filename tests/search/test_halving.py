"""Successive halving keeps the masks that matter, repeats, and goes on where it stopped."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.data.splits import split
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.halving import halve
from hydra_ensembles.search.mask_pool import make_pool
from hydra_ensembles.search.search_state import SearchState
from hydra_ensembles.search.selection import EnsembleObjective
from hydra_ensembles.search.trunk_cache import Prefix
from hydra_ensembles.uncertainty import log_mean_probability

from ..builder.test_building import pictures
from ..zoo import sharp


@pytest.fixture
def host():
    return host_model(sharp("timm").eval())


def trunk_of(host, layers, seed=0):
    from hydra_ensembles.data.loaders import as_data, indexable

    rungs = split(indexable(as_data(pictures(60))), {"a": 0.3, "b": 0.7}, seed=seed)
    prefix = Prefix(host, {f"{k}:id": v for k, v in rungs.items()}, labelled=["a:id", "b:id"])
    for layer in range(layers[0]):
        prefix.advance(torch.ones(host.head_counts[layer], dtype=torch.bool))
    return prefix, rungs


def run(host, pool, layers, state, rungs=("a", "b")):
    prefix, _ = trunk_of(host, layers)
    return halve(
        prefix,
        pool,
        list(rungs),
        objective=EnsembleObjective(),
        members=2,
        at_least=4,
        state=state,
    )


def test_candidates_share_few_stems(host):
    layers = [len(host) - 2, len(host) - 1]
    pool = make_pool(host, layers, size=12, stems=3)
    assert len(pool) == 12 and next(iter(pool)) == HeadMask.full(host)
    assert len({tuple(mask[layers[0]].tolist()) for mask in pool}) <= 3


def test_the_best_single_mask_survives(host):
    layers = [len(host) - 1]
    pool = make_pool(host, layers, size=14, stems=1)
    left = run(host, pool, layers, SearchState(None, {}))
    assert next(iter(left)) == HeadMask.full(host) and 4 <= len(left) < len(pool)
    _, rungs = trunk_of(host, layers)

    def loss(mask):  # by the fused model, which shares no code with the search
        batches = [batch for data in rungs.values() for batch in data]
        logits, labels = collect_logits(fuse(host.model, [mask]), batches)
        return float(-log_mean_probability(logits).gather(-1, labels[:, None]).mean())

    assert min(pool, key=loss) in left


def test_it_goes_on_where_it_stopped(host, tmp_path):
    layers = [len(host) - 2, len(host) - 1]
    pool = make_pool(host, layers, size=14, stems=3)
    whole = run(host, pool, layers, SearchState(None, {}))
    run(host, pool, layers, SearchState(tmp_path, {}), rungs=("a",))
    assert run(host, pool, layers, SearchState(tmp_path, {})) == whole
