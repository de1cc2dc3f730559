"""Thresholds and sets are those of MAPIE, on the same probabilities and numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hydra_ensembles.prediction_sets import uniform_of
from hydra_ensembles.uncertainty import choose_sets
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
    """A source of random numbers that gives out our own, in order."""

    def __init__(self, *numbers: np.ndarray) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return self.numbers.pop(0).reshape(size)


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
        parts = [part.probabilities.astype(float) for part in (held_out, data)]
        numbers = [uniform_of(part, 3) if randomised else np.zeros(len(part)) for part in parts]
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
