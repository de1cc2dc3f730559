"""An ensemble decides by its policy, keeps it in its folder, and drops it when out of date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.fusion.known_data import known_inputs
from hydra_ensembles.uncertainty.policy import METHODS
from tests import zoo
from tests.fusion.test_fusion import EARLY


def batches(first: int, count: int) -> list[Any]:
    return [
        (zoo.batch("vit", size=8, seed=seed), torch.arange(8) % 5)
        for seed in range(first, first + count)
    ]


@pytest.fixture
def ensemble() -> HydraEnsemble:
    made = hydra.fuse(zoo.host("vit"), EARLY).eval()
    made.score = "entropy"
    return made.fit_novelty_(batches(100, 8), progress=False)


@pytest.mark.parametrize("method", METHODS)
def test_decisions_are_the_policys_and_survive_saving(
    ensemble: HydraEnsemble, method: str, tmp_path: Path
) -> None:
    data = batches(0, 6)
    assert ensemble.predict(data[0]).code is None
    assert ensemble.predict(data[0]).abstain is None and ensemble.predict(data[0]).decision is None
    policy = hydra.fit_policy(ensemble, data, risk=0.95, alarm=0.2, method=method)
    assert ensemble.policy is policy and policy.score == "entropy" and policy.examples == 48
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.policy == policy and "policy   answer when entropy" in str(loaded)
    strange = 5 * zoo.batch("vit", size=8, seed=7)
    for batch in (data[0], strange):
        answer, again = ensemble.predict(batch), loaded.predict(batch)
        expected = policy.decide(answer.uncertainty, answer.novelty_score)
        assert answer.code is not None and answer.code.dtype == torch.int64
        assert torch.equal(answer.code, expected) and torch.equal(again.code, expected)
        assert answer.abstain.tolist() == [number != 0 for number in expected.tolist()]
        assert answer.decision == [["answer", "unsure", "new", "new"][n] for n in expected.tolist()]
        assert answer[2:4].decision == answer.decision[2:4]
        assert f"  {answer.decision[0]}\n" in repr(answer)
    assert "new" in answer.decision


def test_a_policy_out_of_date_is_dropped_or_refused(ensemble: HydraEnsemble) -> None:
    data = batches(0, 3)
    policy = hydra.fit_policy(ensemble, data, risk=0.9)
    ensemble.temperature = None  # as it was
    assert ensemble.policy is policy
    ensemble.score = "msp"
    with pytest.raises(HydraError, match="entropy"):
        ensemble.predict(data[0])
    assert hydra.fit_policy(ensemble, data, risk=0.9).score == "msp"
    for change in (
        lambda: setattr(ensemble, "temperature", 1.5),
        lambda: setattr(ensemble, "member_temperatures", [1.0, 2.0, 1.0, 1.0][: ensemble.members]),
        lambda: ensemble.fit_novelty_(batches(60, 6), progress=False),
    ):
        with pytest.warns(UserWarning, match="Fit it again"):
            change()
        assert ensemble.policy is None
        hydra.fit_policy(ensemble, data, risk=0.9)


def test_labels_and_novelty_are_needed_where_promised(ensemble: HydraEnsemble) -> None:
    with pytest.raises(DataError, match=r"no labels.*risk=None"):
        hydra.fit_policy(ensemble, [zoo.batch("vit")])
    with pytest.raises(DataError, match="empty"):
        hydra.fit_policy(ensemble, [])
    only_new = hydra.fit_policy(ensemble, [zoo.batch("vit", size=30, seed=3)], risk=None)
    assert only_new.risk is None and only_new.measured.answered_and_wrong is None
    ensemble.novelty, ensemble.policy = None, None
    with pytest.raises(HydraError, match="fit_novelty_"):
        hydra.fit_policy(ensemble, batches(0, 3))
    plain = hydra.fit_policy(zoo.host("vit"), batches(0, 3), risk=0.9, alarm=None)
    assert plain.score == "msp" and plain.examples == 24


def test_data_that_is_known_already_is_noticed(ensemble: HydraEnsemble) -> None:
    with pytest.warns(UserWarning, match="learnt as known"):
        hydra.fit_policy(ensemble, batches(100, 8), risk=0.9)


def test_inputs_that_are_alike_but_not_known_are_no_cause_for_a_warning() -> None:
    def alike(first: int, count: int) -> list[Any]:
        return [(0.5 + 1e-4 * images, labels) for images, labels in batches(first, count)]

    ensemble = hydra.fuse(zoo.host("vit"), EARLY).eval()
    ensemble.fit_novelty_(alike(100, 8), progress=False)
    hydra.fit_policy(ensemble, alike(0, 4), risk=0.95)  # warnings are errors here


def test_known_examples_are_counted_over_all_batches(tmp_path: Path) -> None:
    made = hydra.fuse(zoo.host("bert"), EARLY).eval()
    known = [{**zoo.batch("bert", size=8, seed=s), "labels": torch.arange(8) % 5} for s in range(6)]
    made.fit_novelty_(known, progress=False)
    made.save_pretrained(tmp_path)
    ensemble = HydraEnsemble.from_pretrained(tmp_path)
    other = {**zoo.batch("bert", size=8, seed=77), "labels": torch.arange(8) % 5}
    padded = {
        name: value if name == "labels" else torch.nn.functional.pad(value, (0, 3))
        for name, value in known[2].items()
    }
    with pytest.warns(UserWarning, match="8 of the 24 labelled examples"):
        hydra.fit_policy(ensemble, [other, padded, other], risk=0.95)
    assert known_inputs(ensemble, padded).all() and not known_inputs(ensemble, other).any()
    ensemble.novelty = replace(ensemble.novelty, hashes=None)  # as saved by older versions
    assert known_inputs(ensemble, padded) is None
    hydra.fit_policy(ensemble, [padded], risk=0.95)


def test_a_failed_fit_keeps_the_policy_before(ensemble: HydraEnsemble) -> None:
    policy = hydra.fit_policy(ensemble, batches(0, 3), risk=0.9)
    with pytest.raises(DataError, match="no labels"):
        hydra.fit_policy(ensemble, [zoo.batch("vit")])
    assert ensemble.policy is policy


@pytest.mark.parametrize("method", ["conformal", "selective"])
def test_a_risk_out_of_reach_keeps_the_policy_before(ensemble: HydraEnsemble, method: str) -> None:
    policy = hydra.fit_policy(ensemble, batches(0, 3), risk=0.9)
    with pytest.raises(DataError, match="smallest risk"):
        hydra.fit_policy(ensemble, batches(0, 3), risk=0.005, method=method)
    assert ensemble.policy is policy
