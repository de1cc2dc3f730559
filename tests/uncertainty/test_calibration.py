"""Temperatures cannot collapse: a prior, never one example, a least number, warnings."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.uncertainty import (
    CalibrationWarning,
    find_temperature,
    fit_member_temperatures,
    fit_temperature,
    log_mean_probability,
)


def sampled(temperature: float, *, members: int = 1, size: int = 4000, seed: int = 1):
    """Logits too sharp by `temperature`: labels drawn from softmax(z), logits given as z * T."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(size, 1, 4, generator=generator)
    labels = torch.multinomial(z[:, 0].softmax(-1), 1, generator=generator)[:, 0]
    return z.expand(-1, members, -1) * temperature, labels


def nll(z: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return float(-log_mean_probability(z / temperature).gather(-1, labels[:, None]).mean())


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_many_examples_find_the_temperature(temperature):
    z, labels = sampled(temperature, members=3)
    assert fit_temperature(z, labels) == pytest.approx(temperature, rel=0.1)
    assert fit_temperature(z, labels) == fit_temperature(z, labels)
    assert fit_member_temperatures(z, labels) == pytest.approx([temperature] * 3, rel=0.1)


def test_without_a_prior_it_is_at_the_minimum_of_the_nll():
    z, labels = sampled(2.5, members=3, size=500)
    best = fit_temperature(z, labels, prior=0)
    assert nll(z, labels, best) <= min(nll(z, labels, best * t) for t in (0.99, 1.01))
    # the prior moves it towards 1, by little
    assert best * 0.94 < fit_temperature(z, labels) < best


@pytest.mark.parametrize("size", [5, 40, 200])
def test_examples_that_are_all_right_support_no_temperature(size):
    z, _ = sampled(1.0, size=size)
    with pytest.warns(CalibrationWarning, match="stays at 1"):
        assert fit_temperature(z, z[:, 0].argmax(-1)) == 1.0


def test_one_class_does_not_collapse():
    z, labels = sampled(1.0)
    for kind in range(4):
        rows = labels == kind
        assert 0.8 < fit_temperature(z[rows][:100], labels[rows][:100]) < 1.25


def test_few_examples_are_not_fitted():
    z, labels = sampled(4.0, size=19)
    with pytest.warns(CalibrationWarning, match="19 examples"):
        assert fit_temperature(z, labels) == 1.0


def test_it_does_not_rest_on_one_example():
    # forty examples as they should be, and a single confident error
    z, labels = sampled(1.0, size=41)
    z = z.clone()
    calm = find_temperature(z[1:], labels[1:]).temperature
    z[0, 0] = torch.tensor([30.0, 0.0, 0.0, 0.0])
    labels[0] = 1
    assert fit_temperature(z, labels, prior=0) > 1.5 * calm
    assert abs(math.log(fit_temperature(z, labels))) <= abs(math.log(calm)) + 0.05


def test_a_bound_warns():
    z, _ = sampled(1.0, size=400)
    wrong = (z[:, 0].argmax(-1) + 1) % 4
    with pytest.warns(CalibrationWarning, match="at its bound"):
        assert fit_temperature(z * 2000, wrong) == pytest.approx(50.0, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(20, 200), seed=st.integers(0, 10_000), sharp=st.floats(0.5, 2.0))
def test_it_never_moves_further_than_the_likelihood(size, seed, sharp):
    z, labels = sampled(sharp, size=size, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        cautious = math.log(fit_temperature(z, labels))
        free = math.log(fit_temperature(z, labels, prior=0))
    assert cautious == 0 or (cautious * free > 0 and abs(cautious) <= abs(free) + 1e-3)


def test_bad_input_is_refused():
    z, labels = sampled(1.0, size=30)
    with pytest.raises(DataError, match="one label"):
        fit_temperature(z, labels[:3])
    z = z.clone()
    z[0, 0, 0] = math.nan
    with pytest.raises(DataError, match="NaN"):
        fit_temperature(z, labels)
