"""`evaluate` with novelty: a score of its own beside the main one, alarms and catches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydra_ensembles import HeadMask, HydraEnsemble, compare, fit_policy, fuse
from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation import evaluate
from hydra_ensembles.evaluation.metrics import ood_figures
from tests import zoo


def data(seed: int, batches: int = 5) -> list[Any]:
    return [(zoo.batch("vit", seed=seed + i), torch.arange(4)) for i in range(batches)]


@pytest.fixture(scope="module")
def ensemble() -> HydraEnsemble:
    full = HeadMask.full(zoo.host("vit"))
    masks = [full.with_layer(2, [head != member for head in range(4)]) for member in range(2)]
    return fuse(zoo.make("vit"), masks).eval().fit_novelty_(data(100, 20), progress=False)


def test_novelty_stands_beside_the_main_score(ensemble: HydraEnsemble) -> None:
    flat = [torch.zeros(4, 3, 16, 16) + 0.1 * i for i in range(3)]
    shifted = [(images + 1, labels) for images, labels in data(0)]
    results = evaluate(
        ensemble, data(0), ood={"flat": flat}, shifts={"brighter": shifted}, progress=False
    )
    assert results.scores == ["msp", "novelty"]

    def scores(batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        answers = [ensemble.predict(batch) for batch in batches]
        return tuple(
            torch.cat([getattr(a, n) for a in answers]) for n in ("novelty_score", "novelty")
        )  # type: ignore[return-value]

    (inside, ranks), (outside, far) = scores(data(0)), scores(flat)
    expected = ood_figures(inside, outside)
    assert results["ood/flat/novelty/AUROC"] == pytest.approx(expected["AUROC"])
    assert results["ood/flat/novelty/Caught_5"] == float((far > 0.95).double().mean())
    assert results["novelty/Alarms_5"] == float((ranks > 0.95).double().mean())
    assert "shift/brighter/novelty/Alarms_5" in results
    assert "ood/mean/novelty/AUROC" in str(results)
    assert "ood/flat/novelty/AUROC" in compare(results, results, count=20)


def test_novelty_as_the_main_score(ensemble: HydraEnsemble) -> None:
    noise = [10 * torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))]
    both = [
        evaluate(ensemble, data(0), ood={"noise": noise}, score=score, progress=False)
        for score in ("msp", "novelty")
    ]
    assert both[1].scores[0] == "novelty"
    assert both[1]["ood/noise/AUROC"] == both[0]["ood/noise/novelty/AUROC"]


def test_a_model_without_novelty_is_told(ensemble: HydraEnsemble) -> None:
    with pytest.raises(DataError, match="fit_novelty_"):
        evaluate(zoo.host("vit"), data(0), score="novelty", progress=False)
    assert evaluate(zoo.host("vit"), data(0), progress=False).scores == ["msp"]


def test_a_policys_decisions_are_counted(ensemble: HydraEnsemble) -> None:
    flat = [torch.zeros(4, 3, 16, 16) + 0.1 * i for i in range(3)]
    without = evaluate(ensemble, data(0), ood={"flat": flat}, progress=False)
    assert not any("policy" in key for key in without)
    try:
        fit_policy(ensemble, data(50, 10), risk=0.7, alarm=0.2, progress=False)
        found = evaluate(
            ensemble, data(0), ood={"flat": flat}, temperature=2.0, bootstrap=20, progress=False
        )
        answers = [ensemble.predict(batch) for batch in data(0)]
        decision = torch.cat([answer.code for answer in answers])  # type: ignore[misc]
        wrong = torch.cat([answer.class_index for answer in answers]) != torch.arange(4).repeat(5)
        assert found["policy/New"] == float((decision == 2).double().mean())
        assert found["policy/Answered"] == float((decision == 0).double().mean()) > 0
        assert found["policy/WrongOfAll"] == float(((decision == 0) & wrong).double().mean())
        assert found["policy/WrongOfAnswered"] == pytest.approx(
            found["policy/WrongOfAll"] / found["policy/Answered"]
        )
        outside = torch.cat([ensemble.predict(b).code for b in flat])  # type: ignore[misc]
        assert found["ood/flat/policy/Answered"] == float((outside == 0).double().mean())
        assert "policy/New" in found.intervals and "policy/New" in str(found)
        assert not any(key.startswith("post/policy") for key in found)
    finally:
        ensemble.policy = None
