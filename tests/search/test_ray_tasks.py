"""Candidates as Ray tasks: the bits of one process, whichever worker dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.builder import build
from hydra_ensembles.data import processes
from hydra_ensembles.data.ray_cluster import start_ray
from hydra_ensembles.errors import DataError, HydraError, MissingDependencyError
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.candidate_runs import climb
from hydra_ensembles.search.headmap import find_circuit, find_effects
from hydra_ensembles.search.ray_tasks import current_tasks, ray_tasks
from hydra_ensembles.search.search_state import TensorStore
from hydra_ensembles.search.trunk_cache import Prefix

from ..zoo import SHARP, images, labelled, sharp

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray once for all tests: a Ray that is there is used, and stays."""
    import ray

    assert start_ray(2)
    yield
    assert ray.is_initialized()
    ray.shutdown()


def batches(count: int = 5) -> list[Any]:
    x, y = images(6 * count)
    return [(x[i : i + 6], y[i : i + 6]) for i in range(0, len(x), 6)]


def masks(model: Any) -> list[HeadMask]:
    return [HeadMask.full(model), *(HeadMask.random(model, keep=2, seed=s) for s in range(7))]


@pytest.mark.parametrize("name", SHARP)
def test_what_is_sent_to_a_worker_computes_the_same_bits(name: str) -> None:
    from ray import cloudpickle

    host = host_model(sharp(name))
    prefix = Prefix(host, {"id": [labelled(name)]})
    x, call = prefix._cache["id", 0]
    gates = [[row.float() for row in mask] for mask in masks(host)]
    engine, states, arguments = cloudpickle.loads(cloudpickle.dumps((prefix.engine, x, call)))
    with torch.no_grad():
        here = climb(prefix.engine, 0, x, call, gates)
        there = climb(engine, 0, states, arguments, gates)
    assert torch.equal(here, there)


def test_what_ray_cannot_help_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp("timm")
    with pytest.raises(ValueError, match="ray=True says nothing to the method 'taylor'"):
        build(model, batches(), method="taylor", ray=True, progress=False)
    with pytest.raises(ValueError, match="workers=0"), ray_tasks(0):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(processes, "size", lambda: 2)
        with pytest.raises(HydraError, match="2 processes of a launcher"), ray_tasks():
            pass
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match=r"hydra-ensembles\[ray\]"):
        build(model, batches(), ray=True, progress=False)
    assert current_tasks() is None


@pytest.mark.slow
def test_build_and_circuits_are_those_of_one_process(cluster: None) -> None:
    model, data = sharp("timm"), batches(10)
    options: dict[str, Any] = {"max_cost": 1.8, "novelty": False, "progress": False}
    for method in ("select", "circuit"):
        alone = build(model, data, method=method, **options).record
        shared = build(model, data, method=method, ray=True, workers=2, **options).record
        assert shared == alone
    with ray_tasks(2) as tasks:
        effects = find_effects(model, id=data, progress=False)
        assert tasks.done >= len(data)
        assert current_tasks() is tasks
    assert effects.effects.tolist() == find_effects(model, id=data, progress=False).effects.tolist()


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(cluster: None, tmp_path: Path) -> None:
    model, data = sharp("timm"), batches()
    gates, store = masks(model), TensorStore(tmp_path / "store")
    alone = Prefix(host_model(model), {"id": data}).logits(gates).logits["id"]
    caller, deaths = os.getpid(), tmp_path / "deaths"
    deaths.mkdir()

    def die_twice(*_: Any) -> None:
        if os.getpid() != caller and len(list(deaths.iterdir())) < 2:
            (deaths / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    hook = model.blocks[1].mlp.fc2.register_forward_hook(die_twice)
    prefix = Prefix(host_model(model), {"id": data})
    with ray_tasks(1) as tasks:
        found = prefix.logits(gates, store=store, label="candidates").logits["id"]
        assert len(list(deaths.iterdir())) == 2
        assert tasks.done == len(data)
        assert torch.equal(found, alone)
        again = prefix.logits(gates, store=store, label="candidates").logits["id"]
        assert torch.equal(again, alone)
        assert tasks.done == len(data)  # nothing was run again: the store had it
    hook.remove()


@pytest.mark.slow
def test_errors_of_workers_are_told_in_their_own_words(cluster: None) -> None:
    model, data = sharp("timm"), batches(2)
    caller = os.getpid()

    def fail(*_: Any) -> None:
        if os.getpid() != caller:
            raise DataError("the third shelf is empty")

    def die(*_: Any) -> None:
        if os.getpid() != caller:
            os.kill(os.getpid(), signal.SIGKILL)

    with ray_tasks(1):
        for hook, words in ((fail, "^the third shelf is empty$"), (die, "its worker died 4 times")):
            handle = model.blocks[1].mlp.fc2.register_forward_hook(hook)
            with pytest.raises(HydraError, match=words):
                find_circuit(model, id=data, progress=False)
            handle.remove()
        assert find_circuit(model, id=data, progress=False)
