"""Every rival: one call, logits of the right shape, an evaluation, an untouched host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hydra_ensembles import cost, evaluate
from hydra_ensembles.data.model_runs import member_logits
from hydra_ensembles.errors import DataError, UnknownNameError
from hydra_ensembles.research.rivals import baselines, make_baseline, relative_cost

from .quadrants import TEST, TRAIN, VALIDATION, host, outliers

MEMBERS = {
    **dict.fromkeys(("single", "temperature", "laplace", "outlier-exposure"), 1),
    **dict.fromkeys(("taylor-single", "circavg-single"), 1),
    **dict.fromkeys(("deep-ensemble", "mc-dropout", "batch-ensemble", "packed-ensemble"), 3),
    **dict.fromkeys(("lora-ensemble", "hydra-taylor", "hydra-circuit", "hydra-select"), 3),
}
NEEDS = {
    "temperature": "validation",
    "deep-ensemble": "train",
    "batch-ensemble": "train",
    "packed-ensemble": "train",
    "lora-ensemble": "train",
    "laplace": "train",
    "taylor-single": "train",
    "circavg-single": "validation",
    "outlier-exposure": "ood",
    "hydra-taylor": "train",
    "hydra-circuit": "validation",
    "hydra-select": "validation",
}


def make(name: str, **options: Any) -> Any:
    scratch = name == "packed-ensemble"  # it has no pretrained start
    return make_baseline(
        name,
        host(),
        train=TRAIN,
        validation=VALIDATION,
        ood=outliers(),
        epochs=15 if scratch else 1,
        learning_rate=3e-3 if scratch else 1e-3,
        progress=False,
        **options,
    )


def test_every_rival_is_here() -> None:
    assert set(baselines) == {*MEMBERS, "vilu"}


@pytest.mark.parametrize("name", MEMBERS)
def test_it_is_one_call_and_can_be_evaluated(name: str) -> None:
    before = {key: value.clone() for key, value in host().state_dict().items()}
    options = {"max_cost": None} if name in ("hydra-circuit", "hydra-select") else None
    rival = make(name, options=options)
    assert not rival.training
    assert member_logits(rival, TEST[0]).shape == (32, MEMBERS[name], 4)
    score = getattr(rival, "score", "msp")
    results = evaluate(rival, TEST, ood={"bright": outliers(seed=9)}, score=score, progress=False)
    assert 0.6 < results["cls/Acc"] <= 1 and 0 <= results["ood/bright/AUROC"] <= 1
    again = host().state_dict()
    assert before.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in host().parameters())


@pytest.mark.parametrize(("name", "kind"), NEEDS.items())
def test_missing_data_is_named(name: str, kind: str) -> None:
    given = {"train": TRAIN, "validation": VALIDATION, "ood": outliers(), kind: None}
    with pytest.raises(DataError, match=f"'{name}' needs {kind} data"):
        make_baseline(name, host(), progress=False, **given)


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(DataError, match="read only once"):
        make_baseline("deep-ensemble", host(), train=iter(TRAIN))


def test_bad_arguments_are_explained() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'laplace'"):
        make_baseline("laplac", host())
    with pytest.raises(TypeError, match=r"'mc-dropout' has no option rat\. It has: rate"):
        make_baseline("mc-dropout", host(), options={"rat": 0.1})
    with pytest.raises(ValueError, match="members=0"):
        make_baseline("single", host(), members=0)
    with pytest.raises(TypeError, match="expected a torch module"):
        make_baseline("single", "resnet")  # type: ignore[arg-type]


def test_cost_is_counted_as_the_library_counts_it() -> None:
    batch = TEST[0]
    assert relative_cost(make("mc-dropout"), host(), batch).multiply_adds == pytest.approx(3)
    found = relative_cost(make("deep-ensemble"), host(), batch)
    assert found.multiply_adds == pytest.approx(3) and found.parameters == pytest.approx(3)
    ensemble = make("hydra-circuit", options={"max_cost": None})
    ensemble.novelty = None  # `cost` counts the network, not the distances beside it
    counted = cost(ensemble, batch).relative_to(cost(host(), batch)).multiply_adds
    assert relative_cost(ensemble, host(), batch).multiply_adds == pytest.approx(counted, rel=0.02)
    assert not math.isclose(counted, 1.0)
