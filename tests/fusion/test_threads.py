"""Predictions from many threads, in every mode: the serial answers, and no flag moves."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.data.eval_mode import evaluating, in_eval, twin
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE


def modes(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def answer(ensemble: Any, batch: Any) -> torch.Tensor:
    if ensemble.is_classifier:
        return ensemble.predict(batch).member_logits
    with torch.no_grad():
        return ensemble.member_logits(batch)


@pytest.mark.parametrize(
    ("engine", "mode"), [("auto", "fused"), ("auto", "loop"), ("host", "fused")]
)
@pytest.mark.parametrize("name", ["bert", "clip-text", "zero-shot-clip"])
@pytest.mark.parametrize("training", [False, True, None])
def test_threads_get_the_serial_answers(
    name: str, training: bool | None, engine: Any, mode: Any
) -> None:
    ensemble = hydra.fuse(zoo.make(name), EARLY, mode=mode, engine=engine)
    if not ensemble.is_classifier and training is not False:
        pytest.skip("A tower has no predict: its member_logits follow the mode.")
    batches = [zoo.batch(name, size=1 + i % 4, seed=i) for i in range(8)]
    serial = [answer(ensemble, batch) for batch in batches]
    ensemble.train(training is not False)
    if training is None:  # mixed: every other module
        for module in list(ensemble.modules())[::2]:
            module.training = False
    before = modes(ensemble)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(answer, ensemble, batches[i % 8]) for i in range(80)]
        answers = [job.result() for job in jobs]
    for i, found in enumerate(answers):
        torch.testing.assert_close(found, serial[i % 8], atol=1e-5, rtol=1e-5)
    assert modes(ensemble) == before


def test_no_flag_moves_while_predict_runs() -> None:
    ensemble = hydra.fuse(zoo.make("bert"), LATE).train()
    seen: list[dict[str, bool]] = []
    handle = ensemble.body.register_forward_pre_hook(lambda *_: seen.append(modes(ensemble)))
    ensemble.predict(zoo.batch("bert"))
    hydra.verify(ensemble, zoo.batch("bert"))
    hydra.evaluate(ensemble, [{**zoo.batch("bert"), "labels": torch.arange(4)}])
    handle.remove()
    assert len(seen) >= 3
    assert all(all(flags.values()) for flags in seen)


def test_a_member_has_a_mode_of_its_own() -> None:
    ensemble = hydra.fuse(zoo.make("vit"), EARLY).train()
    before = modes(ensemble)
    member = ensemble.member(0).eval()
    assert modes(ensemble) == before
    assert not any(modes(member).values())
    shared = {id(p) for p in ensemble.parameters()}
    assert any(id(p) in shared for p in member.parameters())


def test_modes_come_back_when_the_last_thread_is_done() -> None:
    model = zoo.make("vit").train()
    inside, leave = threading.Barrier(2), threading.Event()

    def slow() -> None:
        with evaluating(model):
            inside.wait(5)
            leave.wait(5)
            flags.append(any(modes(model).values()))

    flags: list[bool] = []
    thread = threading.Thread(target=slow)
    thread.start()
    inside.wait(5)
    with evaluating(model):
        assert not any(modes(model).values())
    leave.set()
    thread.join()
    assert flags == [False]
    assert all(modes(model).values())


def test_a_twin_shares_tensors_and_nothing_else() -> None:
    model = zoo.make("bert").train()
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert {id(m) for m in model.modules()}.isdisjoint({id(m) for m in other.modules()})
    other.eval()
    assert all(modes(model).values())
    other.classifier.register_forward_hook(lambda module, inputs, result: result + 1)
    assert not model.classifier._forward_hooks
    plain = copy.deepcopy(model).eval()
    assert in_eval(plain) is plain
    batch = zoo.batch("bert")
    assert torch.equal(zoo.run(in_eval(model), batch), zoo.run(plain, batch))


def test_a_twin_follows_methods_that_a_library_has_wrapped() -> None:
    """Libraries that place modules on devices put a partial of the module in its forward."""
    import functools

    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)).train()
    drop = model[0]
    drop._old_forward = drop.forward
    drop.forward = functools.partial(lambda module, x: module._old_forward(x), drop)
    x = torch.ones(3, 4)
    assert torch.equal(in_eval(model)(x), model[1](x))
