"""The threshold answers as much as the risk allows, and conformal risk control keeps its word."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError, FormatError, UnknownNameError
from hydra_ensembles.uncertainty.abstaining import Abstention, fit_abstention


def brute_force(uncertainty: list[int], wrong: list[bool], risk: float, method: str) -> float:
    best = -math.inf
    for threshold in sorted(set(uncertainty)):
        picked = [w for u, w in zip(uncertainty, wrong, strict=True) if u <= threshold]
        if method == "empirical":
            fine = sum(picked) / len(picked) <= risk
        else:
            n = len(wrong)
            fine = n / (n + 1) * (sum(picked) / n) + 1 / (n + 1) <= risk + 1e-12
        if fine:
            best = threshold
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.051, 0.21, 0.49]),
    st.sampled_from(["empirical", "conformal"]),
)
def test_it_is_the_highest_threshold_that_keeps_the_risk(
    examples: list[tuple[int, bool]], risk: float, method: str
) -> None:
    uncertainty, wrong = [u for u, _ in examples], [w for _, w in examples]
    rule = fit_abstention(
        torch.tensor(uncertainty).double(), torch.tensor(wrong), risk=risk, method=method
    )
    assert rule.threshold == brute_force(uncertainty, wrong, risk, method)
    answered = ~rule.abstains(torch.tensor(uncertainty).double())
    assert rule.coverage == pytest.approx(float(answered.double().mean()))


def draws(count: int, examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw uncertainties in [0, 1] whose examples are wrong with that probability, cubed."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, examples, generator=generator, dtype=torch.float64)
    return u, torch.rand(count, examples, generator=generator) < u**3


@pytest.mark.parametrize("examples", [20, 200])
@pytest.mark.parametrize("risk", [0.06, 0.15])
def test_conformal_risk_control_holds_in_expectation_and_is_not_idle(
    examples: int, risk: float
) -> None:
    u, wrong = draws(600, examples + 1, seed=examples)
    risks = []
    for row, errors in zip(u, wrong, strict=True):
        rule = fit_abstention(row[:-1], errors[:-1], risk=risk, method="conformal")
        # given u, the true rate of a new example that is answered and wrong: t^4 / 4
        risks.append(max(rule.threshold, 0.0) ** 4 / 4)
    mean = sum(risks) / len(risks)
    spread = torch.tensor(risks).std().item() / len(risks) ** 0.5
    assert mean <= risk + 3 * spread
    assert mean >= risk - 2 / (examples + 1) - 0.01  # theorem 2 there: tight to 2 B / (n + 1)


def test_the_empirical_rule_breaks_that_promise_where_data_is_scarce() -> None:
    u, wrong = draws(600, 20, seed=3)
    rules = [fit_abstention(a, b, risk=0.05) for a, b in zip(u, wrong, strict=True)]
    risk = sum(max(rule.threshold, 0.0) ** 3 / 4 for rule in rules) / len(rules)
    assert risk > 0.05  # true error rate among the answered, t^3 / 4, in the mean


def test_no_threshold_is_good_enough() -> None:
    rule = fit_abstention(torch.tensor([0.1, 0.2]), torch.tensor([True, True]), risk=0.1)
    assert rule.threshold == -math.inf and rule.coverage == 0
    assert bool(rule.abstains(torch.tensor([0.0, -1e9])).all())
    few = fit_abstention(torch.rand(9), torch.zeros(9), risk=0.05, method="conformal")
    assert few.coverage == 0  # nine examples cannot promise 5 %


def test_nan_abstains_and_the_rule_survives_json() -> None:
    rule = fit_abstention(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1]), risk=0.3)
    assert rule.abstains(torch.tensor([0.2, 0.21, math.nan])).tolist() == [False, True, True]
    again = Abstention.from_dict(json.loads(json.dumps(rule.to_dict())))
    assert again == rule and "answer when msp <=" in str(again)
    never = fit_abstention(torch.tensor([0.5]), torch.tensor([True]))
    assert Abstention.from_dict(json.loads(json.dumps(never.to_dict()))) == never


def test_what_is_wrong_is_said() -> None:
    good = torch.rand(4), torch.zeros(4)
    with pytest.raises(UnknownNameError, match="empirical, conformal"):
        fit_abstention(*good, method="magic")
    with pytest.raises(ValueError, match="between 0 and 1"):
        fit_abstention(*good, risk=5)
    with pytest.raises(DataError, match="equally long"):
        fit_abstention(torch.rand(3), torch.zeros(4))
    with pytest.raises(DataError, match="NaN"):
        fit_abstention(torch.tensor([math.nan]), torch.tensor([True]))
    with pytest.raises(FormatError, match="no abstention rule"):
        Abstention.from_dict({"threshold": 1})


def test_an_alarm_withholds_what_is_new_and_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    uncertainty = torch.rand(400, generator=generator)
    errors = torch.rand(400, generator=generator) < uncertainty * 0.4
    novelty = torch.rand(400, generator=generator)
    for method in ("empirical", "conformal"):
        rule = fit_abstention(
            uncertainty, errors, risk=0.1, method=method, novelty=novelty, alarm=0.2
        )
        answered = ~rule.abstains(uncertainty, novelty)
        assert not bool(answered[novelty > 0.8].any())
        wrong = float((answered & errors).double().mean())
        assert rule.answered_and_wrong == pytest.approx(wrong)
        assert rule.coverage == pytest.approx(float(answered.double().mean()))
        assert Abstention.from_dict(rule.to_dict()) == rule
        assert "novelty <= 0.8" in str(rule)
    sure, unsure = rule.threshold - 0.01, rule.threshold + 0.01
    words = rule.reasons(
        torch.tensor([sure, unsure, sure, unsure]), torch.tensor([0.1, 0.1, 0.9, 0.9])
    )
    assert words == ["", "too unsure", "too new", "too unsure and too new"]
    with pytest.raises(DataError, match="no novelty"):
        rule.abstains(uncertainty)
    with pytest.raises(DataError, match="novelty of every held-out example"):
        fit_abstention(uncertainty, errors, alarm=0.1)
