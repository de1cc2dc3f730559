"""Accuracy, NLL, Brier and calibration errors equal their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.evaluation.metrics import (
    AdaptiveError,
    brier,
    expected_calibration_error,
    negative_log_likelihood,
    once,
)
from hydra_ensembles.uncertainty import mean_probability

from .strategies import logits_and_labels

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def nll_of(logits, labels) -> float:
    return float(negative_log_likelihood(logits, labels).mean())


def brier_of(logits, labels) -> float:
    return float(brier(logits, labels).mean())


def ece_of(logits, labels) -> float:
    confidence, predicted = mean_probability(logits).max(-1)
    return float(expected_calibration_error(confidence, predicted == labels))


def adaptive(confidence, correct, bins=15) -> float:
    return float(AdaptiveError(confidence, correct, bins=bins).figure(once(len(correct))))


def adaptive_ece_of(logits, labels) -> float:
    confidence, predicted = mean_probability(logits).max(-1)
    return adaptive(confidence.float(), predicted == labels)


FIGURES = (nll_of, brier_of, ece_of, adaptive_ece_of)


@settings(deadline=None, max_examples=40)
@given(logits_and_labels())
def test_equal_to_sklearn_and_torchmetrics(case):
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels = case
    classes = list(range(logits.shape[-1]))
    probability = mean_probability(logits)
    of_label = probability.gather(-1, labels[:, None])
    if bool((of_label > 1e-12).all()):  # below, scikit-learn clips what we do not
        log_loss = sklearn_metrics.log_loss(labels, probability.numpy(), labels=classes)
        assert nll_of(logits, labels) == pytest.approx(log_loss, abs=1e-6)
    if len(classes) > 2:
        reference = sklearn_metrics.brier_score_loss(
            labels, probability.numpy(), labels=classes, scale_by_half=False
        )
        assert brier_of(logits, labels) == pytest.approx(reference, abs=1e-9)
    ece = multiclass_calibration_error(probability, labels, len(classes), n_bins=15, norm="l1")
    assert ece_of(logits, labels) == pytest.approx(float(ece), abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(logits_and_labels())
def test_equal_to_torch_uncertainty(case):
    from torch_uncertainty.metrics.classification import BrierScore, CategoricalNLL
    from torch_uncertainty.metrics.classification.calibration import AdaptiveCalibrationError

    logits, labels = case
    probability, classes = mean_probability(logits), logits.shape[-1]
    reference = float(BrierScore(num_classes=classes)(probability, labels))
    assert brier_of(logits, labels) == pytest.approx(reference, abs=1e-6)
    if bool((probability > 1e-30).all()):
        reference = float(CategoricalNLL()(probability, labels))
        assert nll_of(logits, labels) == pytest.approx(reference, rel=1e-6)
    confidence = probability.float().amax(-1)
    # the reference divides by zero with an empty bin, and its sort leaves ties to the processor
    if len(labels) >= 15 and len(confidence.unique()) == len(confidence):
        metric = AdaptiveCalibrationError(task="multiclass", num_bins=15, num_classes=classes)
        reference = float(metric(probability, labels))
        assert adaptive_ece_of(logits, labels) == pytest.approx(reference, abs=1e-6)


@settings(deadline=None, max_examples=15)
@given(logits_and_labels(), st.randoms(use_true_random=False))
def test_the_order_of_the_data_does_not_matter(case, random):
    logits, labels = case
    order = random.sample(range(len(labels)), len(labels))
    for figure in FIGURES:
        shuffled = figure(logits[order], labels[order])
        assert shuffled == pytest.approx(figure(logits, labels), rel=1e-9, abs=1e-12)


def test_known_values():
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
    labels = torch.tensor([0, 1])
    assert nll_of(logits, labels) == pytest.approx(0.6931472, abs=1e-6)
    assert brier_of(logits, labels) == 0.5
    assert ece_of(logits, labels) == 0.0
    confidence, correct = torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([1, 1, 0, 1]).bool()
    assert float(expected_calibration_error(confidence, correct)) == pytest.approx(0.1)
    assert adaptive(confidence, correct, bins=2) == pytest.approx(0.1)


def test_ensembles_are_judged_by_their_mean_probability():
    logits = torch.tensor([[[4.0, 0.0], [0.0, 8.0]]])  # the second member is surer
    mean = logits.softmax(-1).mean(1)[0, 1]
    assert nll_of(logits, torch.tensor([1])) == pytest.approx(-float(mean.log()), abs=1e-6)


def test_nll_is_not_clipped():
    assert nll_of(torch.tensor([[0.0, 5000.0]]), torch.tensor([0])) == 5000.0
