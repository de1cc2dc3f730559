"""Accuracy, NLL, Brier and calibration errors equal their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.metrics_classification import (
    ECE,
    NLL,
    Accuracy,
    AdaptiveECE,
    Brier,
    adaptive_calibration_error,
    expected_calibration_error,
)
from hydra_ensembles.uncertainty import mean_probability

from .strategies import logits_and_labels

sklearn_metrics = pytest.importorskip("sklearn.metrics")
METRICS = (Accuracy, NLL, Brier, ECE, AdaptiveECE)


def value(metric, logits, labels) -> float:
    metric.update(logits, labels)
    return float(metric.compute())


@settings(deadline=None, max_examples=40)
@given(logits_and_labels())
def test_equal_to_sklearn_and_torchmetrics(case):
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels = case
    classes = list(range(logits.shape[-1]))
    probability = mean_probability(logits)
    right = sklearn_metrics.accuracy_score(labels, probability.argmax(-1))
    assert value(Accuracy(), logits, labels) == pytest.approx(right, abs=1e-9)
    of_label = probability.gather(-1, labels[:, None])
    if bool((of_label > 1e-12).all()):  # below, scikit-learn clips what we do not
        log_loss = sklearn_metrics.log_loss(labels, probability.numpy(), labels=classes)
        assert value(NLL(), logits, labels) == pytest.approx(log_loss, abs=1e-6)
    if len(classes) > 2:
        reference = sklearn_metrics.brier_score_loss(
            labels, probability.numpy(), labels=classes, scale_by_half=False
        )
        assert value(Brier(), logits, labels) == pytest.approx(reference, abs=1e-9)
    ece = multiclass_calibration_error(probability, labels, len(classes), n_bins=15, norm="l1")
    assert value(ECE(), logits, labels) == pytest.approx(float(ece), abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_equal_to_torch_uncertainty(case):
    from torch_uncertainty.metrics.classification import BrierScore, CategoricalNLL
    from torch_uncertainty.metrics.classification.calibration import AdaptiveCalibrationError

    logits, labels = case
    probability, classes = mean_probability(logits), logits.shape[-1]
    reference = float(BrierScore(num_classes=classes)(probability, labels))
    assert value(Brier(), logits, labels) == pytest.approx(reference, abs=1e-6)
    if bool((probability > 1e-30).all()):
        reference = float(CategoricalNLL()(probability, labels))
        assert value(NLL(), logits, labels) == pytest.approx(reference, rel=1e-6)
    confidence = probability.float().amax(-1)
    # the reference divides by zero with an empty bin, and its sort leaves ties to the processor
    if len(labels) >= 15 and len(confidence.unique()) == len(confidence):
        metric = AdaptiveCalibrationError(task="multiclass", num_bins=15, num_classes=classes)
        reference = float(metric(probability, labels))
        assert value(AdaptiveECE(), logits, labels) == pytest.approx(reference, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(logits_and_labels(), st.floats(0.05, 0.95))
def test_merged_halves_are_the_whole(case, cut):
    logits, labels = case
    at = max(1, int(len(labels) * cut))
    for metric in METRICS:
        first, second = metric(), metric()
        first.update(logits[:at], labels[:at])
        if at < len(labels):
            second.update(logits[at:], labels[at:])
            first.merge_state(second)
        assert float(first.compute()) == pytest.approx(value(metric(), logits, labels), rel=1e-9)


@settings(deadline=None, max_examples=15)
@given(logits_and_labels(), st.randoms(use_true_random=False))
def test_the_order_of_the_data_does_not_matter(case, random):
    logits, labels = case
    order = random.sample(range(len(labels)), len(labels))
    for metric in METRICS:
        shuffled = value(metric(), logits[order], labels[order])
        assert shuffled == pytest.approx(value(metric(), logits, labels), rel=1e-9, abs=1e-12)


def test_known_values():
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
    labels = torch.tensor([0, 1])
    assert value(Accuracy(), logits, labels) == 0.5  # a tie goes to the lower class
    assert value(NLL(), logits, labels) == pytest.approx(0.6931472, abs=1e-6)
    assert value(Brier(), logits, labels) == 0.5
    assert value(ECE(), logits, labels) == 0.0
    confidence, correct = torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([1, 1, 0, 1]).bool()
    assert float(expected_calibration_error(confidence, correct)) == pytest.approx(0.1)
    assert float(adaptive_calibration_error(confidence, correct, bins=2)) == pytest.approx(0.1)


def test_ensembles_are_judged_by_their_mean_probability():
    logits = torch.tensor([[[4.0, 0.0], [0.0, 8.0]]])  # the second member is surer
    assert value(Accuracy(), logits, torch.tensor([1])) == 1.0
    mean = logits.softmax(-1).mean(1)[0, 1]
    assert value(NLL(), logits, torch.tensor([1])) == pytest.approx(-float(mean.log()), abs=1e-6)


def test_nll_is_not_clipped():
    assert value(NLL(), torch.tensor([[0.0, 5000.0]]), torch.tensor([0])) == 5000.0


@pytest.mark.parametrize("metric", [m for m in METRICS if m is not AdaptiveECE])
def test_states_do_not_grow(metric):
    one = metric()
    for _ in range(3):
        one.update(torch.randn(4, 2, 3), torch.zeros(4).long())
    assert all(isinstance(getattr(one, name), torch.Tensor) for name in one._defaults)


@pytest.mark.parametrize("metric", METRICS)
def test_no_examples_is_an_error(metric):
    one = metric()
    one._update_count = 1  # torchmetrics warns of a compute before update, which is not the point
    with pytest.raises(DataError, match="call update first"):
        one.compute()
