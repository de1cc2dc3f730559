"""Risk-coverage figures equal torch-uncertainty's, and diversity figures too."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.diversity import Disagreement, MutualInformation, PairwiseKL
from hydra_ensembles.evaluation.metrics_selective import (
    AUGRC,
    AURC,
    CoverageAtRisk,
    ExcessAURC,
    augrc,
    aurc,
    coverage_at_risk,
    excess_aurc,
    risk_coverage,
)
from hydra_ensembles.uncertainty import mean_probability, member_probabilities

from .strategies import logits_and_labels, two_kinds

FUNCTIONS = (aurc, excess_aurc, augrc, coverage_at_risk)
METRICS = (AURC, ExcessAURC, AUGRC, CoverageAtRisk)


def shared(uncertainty, errors):
    """Errors as means of their ties: torch-uncertainty's sort is not stable, so only with equal
    errors inside each tie does its figure not depend on the processor."""
    same = uncertainty[:, None] == uncertainty[None]
    return (same * errors.double()[None]).sum(1) / same.sum(1)


@settings(deadline=None, max_examples=40)
@given(two_kinds())
def test_equal_to_torch_uncertainty_for_any_score(case):
    from torch_uncertainty.metrics import classification as reference

    uncertainty, errors = case
    for ours, metric in ((aurc, reference.AURC()), (augrc, reference.AUGRC())):
        metric.scores, metric.errors = [-uncertainty], [shared(uncertainty, errors)]
        metric._update_count = 1
        assert float(ours(uncertainty, errors)) == pytest.approx(float(metric.compute()), abs=1e-6)
    metric = reference.CovAtxRisk(risk_threshold=0.3)
    metric.scores, metric.errors = [-uncertainty], [shared(uncertainty, errors)]
    metric._update_count = 1
    expected = torch.nan_to_num(metric.compute()).item()  # it says NaN where we say 0
    assert float(coverage_at_risk(uncertainty, errors, risk=0.3)) == pytest.approx(
        expected, abs=1e-6
    )


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_equal_to_torch_uncertainty_from_probabilities(case):
    from torch_uncertainty.metrics import classification as reference

    logits, labels = case
    probability = mean_probability(logits)
    confidence, predicted = probability.max(-1)
    for ours, metric in ((aurc, reference.AURC()), (augrc, reference.AUGRC())):
        expected = float(metric(probability, labels))
        ties = len(confidence) - len(confidence.unique())
        if not ties:
            value = float(ours(-confidence, predicted != labels))
            assert value == pytest.approx(expected, abs=1e-6)


def test_a_tie_is_the_mean_over_its_orders():
    uncertainty = torch.tensor([0.1, 0.5, 0.5, 0.5, 0.9])
    errors = torch.tensor([False, True, False, False, True])
    broken = [
        torch.tensor([0.1, *order, 0.9]) for order in itertools.permutations([0.5, 0.51, 0.52])
    ]
    for function in (aurc, excess_aurc, augrc):
        mean = torch.stack([function(scores, errors) for scores in broken]).mean()
        assert float(function(uncertainty, errors)) == pytest.approx(float(mean), abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(two_kinds(), st.randoms(use_true_random=False))
def test_the_order_of_the_data_does_not_matter(case, random):
    uncertainty, errors = case
    order = random.sample(range(len(errors)), len(errors))
    for function in FUNCTIONS:
        value = float(function(uncertainty[order], errors[order]))
        assert value == pytest.approx(float(function(uncertainty, errors)), abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(two_kinds(), st.floats(0.05, 0.95))
def test_merged_halves_are_the_whole(case, cut):
    uncertainty, errors = case
    at = max(1, min(len(errors) - 1, int(len(errors) * cut)))
    for function, metric in zip(FUNCTIONS, METRICS, strict=True):
        first, second = metric(), metric()
        first.update(uncertainty[:at], errors[:at])
        second.update(uncertainty[at:], errors[at:])
        first.merge_state(second)
        whole = float(function(uncertainty, errors))
        assert float(first.compute()) == pytest.approx(whole, abs=1e-12)


def test_known_values():
    uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.4])
    errors = torch.tensor([False, False, True, False])
    coverage, risk = risk_coverage(uncertainty, errors)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert float(coverage_at_risk(uncertainty, errors, risk=0.25)) == 1.0
    assert float(coverage_at_risk(uncertainty, errors, risk=0.05)) == 0.5
    assert float(coverage_at_risk(uncertainty, torch.ones(4).bool())) == 0.0


@settings(deadline=None, max_examples=15)
@given(two_kinds())
def test_an_oracle_has_no_excess_and_nobody_less(case):
    uncertainty, errors = case
    assert float(excess_aurc(errors.double(), errors)) == 0.0
    assert float(excess_aurc(uncertainty, errors)) >= -1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input_names_the_set(function):
    with pytest.raises(DataError, match=r"'val'.*2 or more"):
        function(torch.rand(1), torch.ones(1), name="val")
    with pytest.raises(DataError, match=r"'val' are NaN"):
        function(torch.full((3,), float("nan")), torch.ones(3), name="val")


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_diversity_equals_torch_uncertainty(case):
    from torch_uncertainty.metrics import classification as reference

    logits, _ = case
    probabilities = member_probabilities(logits)
    ours = MutualInformation()
    ours.update(logits)
    expected = float(reference.MutualInformation()(probabilities))
    assert float(ours.compute()) == pytest.approx(expected, abs=1e-6)
    ours = Disagreement()
    ours.update(logits)
    if logits.shape[1] > 1:
        expected = float(reference.Disagreement()(logits))
        assert float(ours.compute()) == pytest.approx(expected, abs=1e-6)
    else:
        assert float(ours.compute()) == 0.0


@settings(deadline=None, max_examples=15)
@given(logits_and_labels())
def test_pairwise_kl_equals_torch_one_pair_at_a_time(case):
    logits, _ = case
    members = logits.shape[1]
    logs = logits.log_softmax(-1).unbind(1)
    pairs = [(i, j) for i in range(members) for j in range(members) if i != j]
    expected = sum(
        torch.nn.functional.kl_div(logs[j], logs[i], log_target=True, reduction="batchmean")
        for i, j in pairs
    ) / max(len(pairs), 1)
    ours = PairwiseKL()
    ours.update(logits[:1])
    ours.update(logits[1:])
    assert float(ours.compute()) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)
