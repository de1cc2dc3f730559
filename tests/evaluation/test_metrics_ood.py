"""AUROC, AUPR and FPR95 equal their references on inputs made to break them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.metrics import figures_of_scores, ood_figures

from .strategies import two_kinds

sklearn_metrics = pytest.importorskip("sklearn.metrics")


@settings(deadline=None, max_examples=60)
@given(two_kinds())
def test_auroc_and_aupr_equal_sklearn(case):
    scores, positive = case
    assert figures_of_scores(scores, positive)["AUROC"] == pytest.approx(
        sklearn_metrics.roc_auc_score(positive.numpy(), scores.numpy()), abs=1e-9
    )
    assert figures_of_scores(scores, positive)["AUPR"] == pytest.approx(
        sklearn_metrics.average_precision_score(positive.numpy(), scores.numpy()), abs=1e-9
    )


@settings(deadline=None, max_examples=60)
@given(two_kinds())
def test_fpr95_equals_torch_uncertainty_in_both_conventions(case):
    from torch_uncertainty.metrics.classification.fpr import _fprx_compute

    scores, positive = case
    ours = figures_of_scores(scores, positive)
    reference = _fprx_compute(scores, positive.int(), recall_level=0.95, pos_label=1)
    assert ours["FPR95"] == pytest.approx(float(reference), abs=1e-6)
    reference = _fprx_compute(-scores, positive.int(), recall_level=0.95, pos_label=0)
    assert ours["FPR95_ID_positive"] == pytest.approx(float(reference), abs=1e-6)


def test_known_values():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0.1])
    positive = torch.tensor([1, 0, 1, 0, 0, 1, 0]).bool()
    ours = figures_of_scores(scores, positive)
    assert ours["FPR95"] == 0.75  # down to 0.2: three of four negatives
    assert ours["AUROC"] == pytest.approx(8 / 12)
    perfect = ood_figures(torch.arange(10.0), torch.arange(10.0) + 20)
    assert perfect == {"AUROC": 1.0, "AUPR": 1.0, "FPR95": 0.0, "FPR95_ID_positive": 0.0}
    chance = ood_figures(torch.zeros(10), torch.zeros(10))
    assert chance == {"AUROC": 0.5, "AUPR": 0.5, "FPR95": 1.0, "FPR95_ID_positive": 1.0}


def test_the_two_conventions_differ():
    """A few confident OOD examples ruin one and leave the other alone."""
    in_distribution, ood = torch.linspace(0, 1, 100), torch.linspace(2, 3, 100)
    ood[:10] = -1.0
    figures = ood_figures(in_distribution, ood)
    assert figures["FPR95"] == 1.0
    assert figures["FPR95_ID_positive"] == pytest.approx(0.1)


def test_large_energies_are_not_tied():
    """torchmetrics alone would put 300 and 301 through a sigmoid and call them equal."""
    scores = torch.tensor([300.0, 301.0, 302.0, 303.0])
    assert figures_of_scores(scores, torch.tensor([False, False, True, True]))["AUROC"] == 1.0


@pytest.mark.parametrize("kind", [True, False])
def test_one_kind_is_an_error_that_names_the_set(kind):
    with pytest.raises(DataError, match=r"svhn.*both kinds"):
        figures_of_scores(torch.rand(5), torch.full((5,), kind), name="svhn")


def test_nan_and_shapes_are_errors():
    with pytest.raises(DataError, match=r"1 .*'x'.*NaN"):
        figures_of_scores(torch.tensor([0.1, float("nan")]), torch.tensor([0, 1]), name="x")
    with pytest.raises(DataError, match="equally long"):
        figures_of_scores(torch.rand(3), torch.tensor([0, 1]))


def test_integer_scores_are_scores():
    scores = torch.tensor([-(10**15), 5, 10**15, 7])
    assert figures_of_scores(scores, torch.tensor([0, 0, 1, 1]))["AUROC"] == 1.0
