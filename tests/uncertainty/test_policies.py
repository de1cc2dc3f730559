"""Thresholds answer as much as the guarantees allow, and the guarantees hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from hydra_ensembles.errors import DataError, FormatError, UnknownNameError
from hydra_ensembles.prediction import DECISIONS, WHY
from hydra_ensembles.uncertainty import Policy, Rates, choose_policy
from hydra_ensembles.uncertainty.policy_fit import check_reachable, start_sizes


def brute_force(uncertainty: list[int], wrong: list[bool], risk: float, method: str) -> float:
    """Try every threshold by its definition."""
    pairs, values = list(zip(uncertainty, wrong, strict=True)), sorted(set(uncertainty))

    def fine(threshold: int) -> bool:
        picked = [w for u, w in pairs if u <= threshold]
        if method == "empirical":
            return sum(picked) / len(picked) <= risk
        if method == "conformal":
            n = len(wrong)
            return n / (n + 1) * (sum(picked) / n) + 1 / (n + 1) <= risk + 1e-12
        return bool(binom.cdf(sum(picked), len(picked) - 1, risk) <= 0.5 / len(sizes))

    sizes = start_sizes(len(wrong) - 1, risk, 0.5)
    if method != "selective":
        return max((t for t in values if fine(t)), default=-math.inf)
    best = -math.inf
    for size in sizes:
        for t in values:
            if sum(u <= t for u in uncertainty) < size + 1:
                continue
            if not fine(t):
                break
            best = max(best, t)
    return best


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.051, 0.21, 0.49]),
    st.sampled_from(["empirical", "conformal", "selective"]),
)
def test_it_is_the_highest_threshold_that_keeps_the_risk(
    examples: list[tuple[int, bool]], risk: float, method: str
) -> None:
    uncertainty, wrong = [u for u, _ in examples], [w for _, w in examples]
    policy = choose_policy(
        torch.tensor(uncertainty).double(),
        torch.tensor(wrong),
        risk=risk,
        alarm=None,
        method=method,
        delta=0.5,
    )
    assert policy.threshold == brute_force(uncertainty, wrong, risk, method)


def test_sequences_start_where_so_many_errors_just_pass() -> None:
    for most, number in ((100, 0), (200, 1), (475, 2), (5000, 5)):
        sizes = start_sizes(most, 0.02, 0.1)
        assert len(sizes) == number
        for errors, size in zip((0, 2, 6, 14, 30), sizes, strict=False):
            level = 0.1 / number
            assert binom.cdf(errors, size, 0.02) <= level < binom.cdf(errors, size - 1, 0.02)


def draws(count: int, examples: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw examples: novelty s and uncertainty u in [0, 1], wrong with probability u^3 (1 + s) / 2.

    Given thresholds t and q, all rates of a new example are integrals that are known.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (count, examples)
    s = torch.rand(*shape, generator=generator, dtype=torch.float64)
    u = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return s, u, torch.rand(*shape, generator=generator) < u**3 * (1 + s) / 2


def true_rates(policy: Policy) -> tuple[float, float, float]:
    """Return the probabilities of new, answered and wrong, and wrong if answered."""
    q, t = min(policy.novelty_threshold, 1.0), max(min(policy.threshold, 1.0), 0.0)
    wrong = t**4 / 4 * (q + q**2 / 2) / 2
    return 1 - q, wrong, wrong / (q * t) if t else 0.0


def holds(values: list[float], bound: float) -> bool:
    rates = torch.tensor(values)
    return float(rates.mean()) <= bound + 3 * float(rates.std()) / len(values) ** 0.5


@pytest.mark.parametrize("examples", [25, 200])
@pytest.mark.parametrize("risk", [0.06, 0.15])
def test_conformal_guarantees_hold_in_expectation_and_are_not_idle(
    examples: int, risk: float
) -> None:
    alarm = 0.1
    new, wrong = [], []
    for s, u, errors in zip(*draws(600, examples, seed=examples), strict=True):
        policy = choose_policy(u, errors, novelty_score=s, risk=risk, alarm=alarm)
        rates = true_rates(policy)
        new.append(rates[0])
        wrong.append(rates[1])
    assert holds(new, alarm) and sum(new) / 600 > alarm - 1.5 / examples - 0.01
    assert holds(wrong, risk)
    most = 0.25 * (1 - alarm) * (1 + (1 - alarm) / 2) / 2  # when everything known is answered
    assert sum(wrong) / 600 > min(risk, most) - 2.5 / examples - 0.015


@pytest.mark.parametrize("delta", [0.1, 0.4])
def test_the_selective_guarantee_holds_with_its_probability(delta: float) -> None:
    over, answered = 0, []
    settings = {"risk": 0.08, "alarm": 0.1, "method": "selective", "delta": delta}
    for s, u, errors in zip(*draws(400, 300, seed=5), strict=True):
        policy = choose_policy(u, errors, novelty_score=s, **settings)  # type: ignore[arg-type]
        over += true_rates(policy)[2] > 0.08
        answered.append(max(policy.threshold, 0.0))
    assert over / 400 <= delta + 3 * (delta * (1 - delta) / 400) ** 0.5
    assert sum(answered) / 400 > 0.4  # the best threshold is about 0.69


def test_the_empirical_rule_breaks_the_selective_guarantee_where_data_is_scarce() -> None:
    s, u, wrong = draws(400, 20, seed=3)
    rates = [
        true_rates(choose_policy(a, b, novelty_score=c, risk=0.05, method="empirical"))[2]
        for a, b, c in zip(u, wrong, s, strict=True)
    ]
    assert sum(rate > 0.05 for rate in rates) > 0.3 * 400


def test_measured_rates_are_out_of_fold() -> None:
    s, u, wrong = (part[0] for part in draws(1, 400, seed=9))
    policy = choose_policy(u, wrong, novelty_score=s, risk=0.05, alarm=0.1)
    inside = Rates.of(policy.decide(u, s), wrong)
    measured = policy.measured
    assert measured is not None and measured.examples == 400 and measured != inside
    assert measured.answer + measured.unsure + measured.new == pytest.approx(1)
    assert measured.answer == pytest.approx(inside.answer, abs=0.05)
    assert inside.answered_and_wrong is not None and inside.answered_and_wrong <= 0.05
    assert inside.wrong_if_answered == pytest.approx(inside.answered_and_wrong / inside.answer)


def test_no_threshold_is_good_enough() -> None:
    few = choose_policy(torch.rand(9), torch.zeros(9), risk=0.05, alarm=None)
    assert few.never_answers and "everything abstains" in str(few)  # nine cannot guarantee 5 %
    assert few.decide(torch.tensor([0.0, -1e9])).tolist() == [1, 1]
    many = choose_policy(torch.rand(9), novelty_score=torch.rand(9), risk=None, alarm=0.05)
    assert many.novelty_threshold == math.inf  # nor 5 % of alarms: none at all


def ranked(count: int, wrong: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uncertainties in order, and the errors at some ranks."""
    errors = torch.zeros(count, dtype=torch.bool)
    errors[wrong] = True
    return torch.arange(count).double(), errors


SURE_AND_WRONG = ranked(400, [0, 2, 4, 6, *range(200, 240)])
OUT_OF_REACH: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too few for conformal": (ranked(40, [39]), {"risk": 0.005}, "199 labelled"),
    "too few for selective": (ranked(100, [99]), {"method": "selective"}, "115 labelled"),
    "the surest are wrong": (SURE_AND_WRONG, {"risk": 0.005}, "enough examples"),
    "empirical": (ranked(400, [1, *range(3, 60)]), {"method": "empirical"}, "enough examples"),
}


@pytest.mark.parametrize("case", OUT_OF_REACH)
def test_a_risk_out_of_reach_is_refused_with_the_smallest_in_reach(case: str) -> None:
    data, settings, needed = OUT_OF_REACH[case]
    settings = {"risk": 0.02, "alarm": None, **settings}
    with pytest.raises(DataError, match=needed) as refused:
        check_reachable(choose_policy(*data, **settings), *data)
    found = re.search(r"smallest risk .* is (0\.\d+)", str(refused.value))
    assert found is not None
    smallest = float(found[1])
    assert smallest > settings["risk"]
    check_reachable(choose_policy(*data, **{**settings, "risk": smallest}), *data)
    less = choose_policy(*data, **{**settings, "risk": 0.9 * smallest})
    with pytest.raises(DataError, match="smallest risk"):
        check_reachable(less, *data)


@pytest.mark.parametrize("method", ["conformal", "selective", "empirical"])
def test_a_risk_in_reach_is_not_refused(method: str) -> None:
    for s, u, errors in zip(*draws(100, 300, seed=11), strict=True):
        policy = choose_policy(u, errors, novelty_score=s, risk=0.1, alarm=0.1, method=method)
        check_reachable(policy, u, errors, s)
    everything = ranked(60, [5, 50])
    check_reachable(choose_policy(*everything, risk=0.2, alarm=None), *everything)


def test_nan_abstains_new_wins_and_reasons_are_said() -> None:
    policy = Policy(threshold=0.2, novelty_threshold=3.0, alarm=0.1)
    uncertainty = torch.tensor([0.2, 0.21, math.nan, 0.1, 0.1, 0.9])
    novelty = torch.tensor([3.0, 1.0, 1.0, 3.01, math.nan, 9.0])
    decision = policy.decide(uncertainty, novelty)
    assert decision.dtype == torch.int64 and decision.tolist() == [0, 1, 1, 2, 2, 3]
    assert [DECISIONS[code] for code in decision[3:].tolist()] == ["new", "new", "new"]
    assert [WHY[code] for code in decision.tolist()][:2] == [None, "too unsure"]
    assert (WHY[2], WHY[3]) == ("too new", "too unsure and too new")
    with pytest.raises(DataError, match="no novelty"):
        policy.decide(uncertainty)


@pytest.mark.parametrize("method", ["conformal", "selective", "empirical"])
def test_a_policy_survives_json(method: str) -> None:
    s, u, wrong = (part[0] for part in draws(1, 300, seed=1))
    for alarm in (0.1, None):
        policy = choose_policy(
            u, wrong, novelty_score=s, risk=0.1, alarm=alarm, method=method, score="entropy"
        )
        again = Policy.from_dict(json.loads(json.dumps(policy.to_dict())))
        assert again == policy and "answer when entropy <=" in str(again)
        assert (method in str(again)) and ("new" in str(again)) == (alarm is not None)
    only_new = choose_policy(u, None, novelty_score=s, risk=None, alarm=0.1, method=method)
    assert "inf" not in str(only_new) and "answer when the novelty score <=" in str(only_new)
    never = choose_policy(torch.tensor([0.5]), torch.tensor([True]), alarm=None)
    assert Policy.from_dict(json.loads(json.dumps(never.to_dict()))) == never


def test_what_is_wrong_is_said() -> None:
    good = torch.rand(4), torch.zeros(4)
    with pytest.raises(UnknownNameError, match="conformal, selective"):
        choose_policy(*good, alarm=None, method="magic")
    with pytest.raises(ValueError, match="between 0 and 1"):
        choose_policy(*good, risk=5, alarm=None)
    with pytest.raises(ValueError, match="nothing to decide"):
        choose_policy(*good, risk=None, alarm=None)
    with pytest.raises(DataError, match="equally long"):
        choose_policy(torch.rand(3), torch.zeros(4), alarm=None)
    with pytest.raises(DataError, match="NaN"):
        choose_policy(torch.tensor([math.nan]), torch.tensor([True]), alarm=None)
    with pytest.raises(DataError, match="novelty score"):
        choose_policy(*good)
    with pytest.raises(DataError, match=r"labelled.*wrong"):
        choose_policy(torch.rand(4), novelty_score=torch.rand(4))
    for wrong in ({"threshold": 1}, {"threshold": 1, "novelty_threshold": 1, "risk": 7}):
        with pytest.raises(FormatError, match="valid policy"):
            Policy.from_dict(wrong)
