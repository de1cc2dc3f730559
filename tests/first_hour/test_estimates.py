"""Long work says beforehand how long it will take, where somebody wants to know."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.data import progress
from hydra_ensembles.research import head_map
from tests import zoo

IDS = torch.randint(2, 90, (48, 6), generator=torch.Generator().manual_seed(0))
DATA = [
    {"input_ids": IDS[i : i + 8], "labels": torch.arange(i, i + 8) % 3} for i in range(0, 48, 8)
]
WORK: dict[str, Callable[[Any], Any]] = {
    "evaluating": lambda m: hydra.evaluate(m, DATA, bootstrap=0),
    "timing": lambda m: hydra.benchmark({"one": m}, DATA[0], batch_sizes=(1,), rounds=1),
    "head map": lambda m: head_map(m, id=DATA, layers=[1]),
    "searching": lambda m: hydra.find_circuit(m, id=DATA, layers=[1]),
    "scoring units": lambda m: hydra.score_heads(m, DATA, criterion="taylor"),
    "fitting novelty": lambda m: hydra.fuse(m, [hydra.HeadMask.full(m)]).fit_novelty_(
        DATA, choose=False
    ),
    "pruning": lambda m: hydra.prune(m, DATA, max_cost=0.9),
    "folding": lambda m: hydra.fold([m, m], DATA, max_cost=3.0),
    "Selecting 2 members among": lambda m: hydra.build(
        m, DATA, method="select", members=2, max_cost=1.4, novelty=False
    ),
    "distilling": lambda m: hydra.distill(m, [m, m], DATA, members=2, epochs=1, max_cost=3.0),
    "fine-tuning": lambda m: hydra.finetune(m, DATA, epochs=1),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo._bert(num_labels=3).eval()


@pytest.mark.parametrize("what", WORK)
def test_it_is_said_beforehand(
    what: str, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    caplog.set_level(logging.INFO, "hydra_ensembles")
    WORK[what](model)
    assert [line for line in caplog.messages if re.match(rf"{what}.*: (about|up to) \d+ s", line)]


def test_nothing_is_said_of_short_work_or_where_nobody_asked(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    hydra.evaluate(model, DATA, bootstrap=0)  # no terminal, no log
    monkeypatch.setattr(progress, "LONG", 0.0)
    hydra.evaluate(model, DATA, bootstrap=0)
    assert "about" not in capsys.readouterr().err
    monkeypatch.undo()
    caplog.set_level(logging.INFO, "hydra_ensembles")
    hydra.evaluate(model, DATA, bootstrap=0)
    assert not [line for line in caplog.messages if "about" in line]


def test_timing_a_batch_leaves_torchs_generator_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.data import DataLoader

    from hydra_ensembles.data.model_runs import expect_batches

    monkeypatch.setattr(progress, "LONG", 0.0)
    caplog.set_level(logging.INFO, "hydra_ensembles")
    loader = DataLoader([{"input_ids": row} for row in IDS], batch_size=8, shuffle=True)
    before = torch.get_rng_state()
    expect_batches(model, loader, len(loader), "the work")
    assert caplog.messages and torch.equal(torch.get_rng_state(), before)
