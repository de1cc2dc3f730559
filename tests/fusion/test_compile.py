"""A calibrated ensemble compiles and exports as one graph, for any size of batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from tests import zoo
from tests.fusion.test_fusion import EARLY


def calibrated(name: str) -> hydra.HydraEnsemble:
    ensemble = hydra.fuse(zoo.make(name), EARLY).eval()
    ensemble.temperature, ensemble.member_temperatures = 1.3, [1.0, 2.0, 0.7]
    return ensemble


def inputs(name: str, size: int) -> dict[str, torch.Tensor]:
    batch = zoo.batch(name, size=size, seed=size)
    return batch if isinstance(batch, dict) else {"pixel_values": batch}


def assert_same(graph: Any, ensemble: Any, name: str) -> None:
    for size in (2, 3, 5, 7):
        batch = inputs(name, size)
        torch.testing.assert_close(graph(**batch).logits, ensemble(**batch).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_one_compilation_serves_every_size_of_batch(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    ensemble = calibrated(name)
    for dynamic, compilations in ((True, 1), (None, 2)):  # by default the second size is dynamic
        torch._dynamo.reset()
        counter = CompileCounter()
        graph = torch.compile(ensemble, fullgraph=True, dynamic=dynamic, backend=counter)
        assert_same(graph, ensemble, name)
        assert counter.frame_count == compilations


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_an_exported_program_takes_every_size_of_batch(name: str) -> None:
    ensemble = calibrated(name)
    ensemble.predict(inputs(name, 2))
    example = inputs(name, 4)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {key: {0: batch} for key in example}
    program = torch.export.export(ensemble, (), example, dynamic_shapes=shapes)
    assert_same(program.module(), ensemble, name)


@torch.no_grad()
@pytest.mark.parametrize(("name", "engine"), [("vit", "fused"), ("bert", "fused"), ("vit", "host")])
def test_linear_readouts_compile(name: str, engine: str) -> None:
    from tests.refit.test_linear_readouts import given_readouts

    ensemble = given_readouts(name, engine)
    torch._dynamo.reset()
    whole = engine == "fused"  # the host engine is not one graph, with readouts or without
    assert_same(torch.compile(ensemble, fullgraph=whole, backend="eager"), ensemble, name)


@torch.no_grad()
def test_a_compiled_ensemble_follows_its_weights() -> None:
    ensemble = calibrated("vit")
    ensemble.predict(inputs("vit", 2))
    for parameter in ensemble.parameters():  # what was packed for speed is stale now
        parameter.mul_(1.1)
    torch._dynamo.reset()
    graph = torch.compile(ensemble, fullgraph=True, backend="eager")
    batch = inputs("vit", 2)
    torch.testing.assert_close(graph(**batch).logits, ensemble(**batch).logits)
    for parameter in ensemble.parameters():
        parameter.mul_(1.1)
    torch.testing.assert_close(graph(**batch).logits, ensemble(**batch).logits)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "warm", True])
def test_a_temperature_is_checked_when_it_is_set(bad: Any) -> None:
    ensemble = calibrated("vit")
    with pytest.raises(ValueError, match="not a positive number"):
        ensemble.temperature = bad
    with pytest.raises(ValueError, match="not a positive number"):
        ensemble.member_temperatures = [1.0, 2.0, bad]
    with pytest.raises(ValueError, match="2 member temperatures for 3 members"):
        ensemble.member_temperatures = [1.0, 2.0]
    assert ensemble.temperature == 1.3
    ensemble.temperature = torch.tensor(2.0)
    assert isinstance(ensemble.temperature, float)
