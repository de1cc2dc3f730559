"""Thresholds and sets are those of MAPIE, on the same probabilities and numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hydra_ensembles.prediction_sets import Sets, uniform_of
from hydra_ensembles.uncertainty import choose_sets
from hydra_ensembles.uncertainty.set_fit import _penalty, threshold
from tests.uncertainty.test_set_fit import CLASSES, answer, classes

pytest.importorskip("mapie")


class GivenProbabilities:
    """A classifier of scikit-learn whose inputs are its probabilities."""

    def __init__(self, count: int = CLASSES) -> None:
        self.classes_ = np.arange(count)
        self.is_fitted_, self.n_features_in_ = True, count

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, X: Any, y: Any) -> GivenProbabilities:
        return self

    def predict_proba(self, X: Any) -> Any:
        return np.asarray(X)

    def predict(self, X: Any) -> Any:
        return np.asarray(X).argmax(-1)


class GivenNumbers(np.random.RandomState):
    """A source of random numbers that gives out our own, in order, and then zeros."""

    def __init__(self, *numbers: np.ndarray) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return self.numbers.pop(0).reshape(size) if self.numbers else np.zeros(size)


def mapie_sets(
    score: Any,
    held_out: np.ndarray,
    labels: np.ndarray,
    data: np.ndarray,
    *,
    last: Any,
    **given: Any,
) -> tuple[float, np.ndarray]:
    """Return MAPIE's threshold and sets, `[example, class]`."""
    mapie = pytest.importorskip("mapie.classification")
    made = mapie.SplitConformalClassifier(
        GivenProbabilities(), confidence_level=0.9, conformity_score=score, prefit=True, **given
    )
    made.conformalize(held_out, labels)
    _, sets = made.predict_set(data, conformity_score_params={"include_last_label": last})
    return float(np.ravel(made._mapie_classifier.conformity_score_function_.quantiles_)[0]), sets[
        ..., 0
    ]


@pytest.mark.parametrize("count", [99, 108, 300])
@pytest.mark.parametrize("method", ["lac", "aps", "aps randomised"])
def test_sets_of_classes_are_those_of_mapie(method: str, count: int) -> None:
    name, _, randomised = method.partition(" ")
    logits, labels = classes(count + 500)
    given = answer(logits).to_numpy()
    held_out, data = given[:count], given[count:]
    sets = choose_sets(held_out, labels[:count], method=name, randomised=bool(randomised), seed=3)
    options: dict[str, Any] = {}
    last: Any = True
    if name == "aps":
        parts = [part.probabilities.astype(float) for part in (held_out, data)] * bool(randomised)
        numbers = [uniform_of(part, 3) for part in parts]
        # without random numbers the class at the threshold is kept: no more than the threshold
        last = "randomized" if randomised else False
        options["random_state"] = GivenNumbers(*numbers)
    limit, theirs = mapie_sets(
        name,
        held_out.probabilities.astype(float),
        labels[:count].numpy(),
        data.probabilities.astype(float),
        last=last,
        **options,
    )
    assert math.isclose(sets.thresholds[0][0], limit, rel_tol=1e-12)
    ours = sets.mask(data)
    if method == "aps":  # MAPIE then never gives an empty set
        empty = ~ours.any(1)
        assert (theirs[empty].sum(1) == 1).all() and empty.mean() < 0.2
        ours, theirs = ours[~empty], theirs[~empty]
    assert (ours == theirs).all() and 0.05 < ours.mean() < 0.95


def test_penalised_sets_are_those_of_mapie() -> None:
    from mapie.classification import SplitConformalClassifier
    from mapie.conformity_scores import RAPSConformityScore
    from sklearn.model_selection import StratifiedShuffleSplit

    count, size = 300, 500
    logits, labels = classes(count + size)
    given = answer(logits).to_numpy()
    probabilities, marks = given.probabilities.astype(float), labels.numpy()
    score = RAPSConformityScore()
    made = SplitConformalClassifier(
        GivenProbabilities(),
        confidence_level=0.9,
        conformity_score=score,
        prefit=True,
        random_state=GivenNumbers(),
    ).conformalize(probabilities[:count], marks[:count])
    options = {"conformity_score_params": {"include_last_label": False}}
    theirs = made.predict_set(probabilities[count:], **options)[1][..., 0]
    share = 1 - score.n_samples_ / count
    split = StratifiedShuffleSplit(n_splits=1, test_size=share, random_state=GivenNumbers())
    rest, tuned = next(split.split(probabilities[:count], marks[:count]))
    assert _penalty(given[tuned], marks[tuned], 0.9)[1] == int(score.k_star[0])
    rule = Sets(
        "raps",
        0.9,
        thresholds=(),
        counts=(),
        examples=len(rest),
        penalty=float(score.lambda_star),
        free=int(score.k_star[0]),
    )
    scores = rule.scores(given[rest])[np.arange(len(rest)), marks[rest]]
    limit, _ = threshold(scores, rest, 0.9)
    assert rule.penalty > 0 and math.isclose(limit, float(np.ravel(score.quantiles_)[0]))
    ours = replace(rule, thresholds=((limit,),), counts=((len(rest),),)).mask(given[count:])
    empty = ~ours.any(1)
    assert (ours[~empty] == theirs[~empty]).all() and empty.mean() < 0.2
    assert 0.05 < ours.mean() < 0.95


class GivenNumber:
    """A regressor of scikit-learn whose input is its answer."""

    is_fitted_, n_features_in_ = True, 1

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, X: Any, y: Any) -> GivenNumber:
        return self

    def predict(self, X: Any) -> Any:
        return np.asarray(X)[:, 0]


@pytest.mark.parametrize("count", [99, 108, 300])
def test_intervals_are_those_of_mapie(count: int) -> None:
    from mapie.regression import SplitConformalRegressor

    generator = torch.Generator().manual_seed(count)
    members = torch.randn(count + 50, 3, 1, generator=generator)
    given = answer(members, "regression").to_numpy()
    numbers = given.values.astype(float) + np.random.default_rng(0).normal(size=(count + 50, 1))
    sets = choose_sets(given[:count], numbers[:count], method="plain")
    made = SplitConformalRegressor(GivenNumber(), confidence_level=0.9, prefit=True)
    values = given.values.astype(float)
    made.conformalize(values[:count], numbers[:count, 0])
    theirs = made.predict_interval(values[count:])[1][..., 0]
    assert np.abs(sets.intervals(given[count:])[:, 0] - theirs).max() < 1e-12


def test_labels_are_kept_as_mapie_controls_their_recall() -> None:
    from mapie.risk_control import MultiLabelClassificationController

    generator = torch.Generator().manual_seed(0)
    truth = 1.5 * torch.randn(400, 1, 5, generator=generator)
    labels = torch.bernoulli(truth[:, 0].sigmoid(), generator=generator)
    labels[~labels.bool().any(1), 0] = 1.0
    given = answer(truth + 0.3 * torch.randn(400, 3, 5, generator=generator), "multi-label")
    sets = choose_sets(given, labels, method="lac")
    chances = given.to_numpy().probabilities.astype(float)
    grid = np.arange(0, 1, 0.001)
    controller = MultiLabelClassificationController(
        lambda X: X, risk="recall", method="crc", target_level=0.9, predict_params=grid
    )
    controller.calibrate(chances, labels.numpy().astype(int))
    theirs = float(np.ravel(controller.best_predict_param)[0])
    # the largest probability that keeps the risk, on their grid
    assert 0 <= (1 - sets.thresholds[0][0]) - theirs <= 0.001 + 1e-9
