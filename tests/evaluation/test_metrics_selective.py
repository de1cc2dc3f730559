"""Risk-coverage figures equal torch-uncertainty's, and diversity figures too."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.metrics import RISK, Order, Selection, once, risk_coverage
from hydra_ensembles.uncertainty import (
    disagreement,
    mean_probability,
    member_probabilities,
    mutual_information,
    pairwise_kl,
)

from .strategies import logits_and_labels, two_kinds

FIGURES = ("AURC", "E-AURC", "AUGRC", "Cov_5Risk")


def figures(
    uncertainty: torch.Tensor, errors: torch.Tensor, *, at_most: float = RISK
) -> dict[str, float]:
    order = Order(uncertainty)
    found = Selection(order, errors, at_most=at_most).figures(order.weigh(once(len(errors))))
    return {key: float(value) for key, value in found.items()}


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
    for ours, metric in (("AURC", reference.AURC()), ("AUGRC", reference.AUGRC())):
        metric.scores, metric.errors = [-uncertainty], [shared(uncertainty, errors)]
        metric._update_count = 1
        assert figures(uncertainty, errors)[ours] == pytest.approx(
            float(metric.compute()), abs=1e-6
        )
    limit = 0.3 + math.pi / 1e4  # no share of a few examples: at equality rounding would decide
    metric = reference.CovAtxRisk(risk_threshold=limit)
    metric.scores, metric.errors = [-uncertainty], [shared(uncertainty, errors)]
    metric._update_count = 1
    expected = torch.nan_to_num(metric.compute()).item()  # it says NaN where we say 0
    answered = figures(uncertainty, errors, at_most=limit)["Cov_5Risk"]
    assert answered == pytest.approx(expected, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_equal_to_torch_uncertainty_from_probabilities(case):
    from torch_uncertainty.metrics import classification as reference

    logits, labels = case
    probability = mean_probability(logits)
    confidence, predicted = probability.max(-1)
    for ours, metric in (("AURC", reference.AURC()), ("AUGRC", reference.AUGRC())):
        expected = float(metric(probability, labels))
        ties = len(confidence) - len(confidence.unique())
        if not ties:
            value = figures(-confidence, predicted != labels)[ours]
            assert value == pytest.approx(expected, abs=1e-6)


def test_a_tie_is_the_mean_over_its_orders():
    uncertainty = torch.tensor([0.1, 0.5, 0.5, 0.5, 0.9])
    errors = torch.tensor([False, True, False, False, True])
    broken = [
        torch.tensor([0.1, *order, 0.9]) for order in itertools.permutations([0.5, 0.51, 0.52])
    ]
    for name in FIGURES[:3]:
        mean = sum(figures(scores, errors)[name] for scores in broken) / len(broken)
        assert figures(uncertainty, errors)[name] == pytest.approx(mean, abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(two_kinds(), st.randoms(use_true_random=False))
def test_the_order_of_the_data_does_not_matter(case, random):
    uncertainty, errors = case
    order = random.sample(range(len(errors)), len(errors))
    shuffled = figures(uncertainty[order], errors[order])
    assert shuffled == pytest.approx(figures(uncertainty, errors), abs=1e-12)


def test_known_values():
    uncertainty = torch.tensor([0.1, 0.2, 0.3, 0.4])
    errors = torch.tensor([False, False, True, False])
    coverage, risk = risk_coverage(uncertainty, errors)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert figures(uncertainty, errors, at_most=0.25)["Cov_5Risk"] == 1.0
    assert figures(uncertainty, errors, at_most=0.05)["Cov_5Risk"] == 0.5
    assert figures(uncertainty, torch.ones(4).bool())["Cov_5Risk"] == 0.0


@settings(deadline=None, max_examples=15)
@given(two_kinds())
def test_an_oracle_has_no_excess_and_nobody_less(case):
    uncertainty, errors = case
    assert figures(errors.double(), errors)["E-AURC"] == pytest.approx(0.0, abs=1e-12)
    assert figures(uncertainty, errors)["E-AURC"] >= -1e-12


def test_bad_input_names_the_set():
    with pytest.raises(DataError, match=r"'val'.*2 or more"):
        risk_coverage(torch.rand(1), torch.ones(1), name="val")
    with pytest.raises(DataError, match=r"'val'.*NaN"):
        risk_coverage(torch.full((3,), float("nan")), torch.ones(3), name="val")


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_diversity_equals_torch_uncertainty(case):
    from torch_uncertainty.metrics import classification as reference

    logits, _ = case
    probabilities = member_probabilities(logits)
    expected = float(reference.MutualInformation()(probabilities))
    assert float(mutual_information(logits).mean()) == pytest.approx(expected, abs=1e-6)
    if logits.shape[1] > 1:
        expected = float(reference.Disagreement()(logits))
        assert float(disagreement(logits).double().mean()) == pytest.approx(expected, abs=1e-6)
    else:
        assert float(disagreement(logits).double().mean()) == 0.0


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
    assert float(pairwise_kl(logits).mean()) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)
