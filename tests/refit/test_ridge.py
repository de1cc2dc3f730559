"""Ridge regression by streaming moments: equal to the usual solvers, independent of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.refit.ridge import Linear, Moments, fit, solve


def rows(count: int = 200, *, seed: int = 0, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return features far from the origin and targets that are almost linear in them."""
    generator = torch.Generator().manual_seed(seed)
    features = 100 + torch.randn(count, 12, generator=generator, dtype=torch.float64)
    true = torch.randn(12, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    extra = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return features, features @ true - 7 + noise * extra


def streamed(features: Tensor, targets: Tensor, size: int) -> Moments:
    parts = [
        Moments.of(u, y) for u, y in zip(features.split(size), targets.split(size), strict=True)
    ]
    return sum(parts[1:], parts[0])


def test_without_a_ridge_it_is_least_squares() -> None:
    features, targets = rows()
    ours = solve(Moments.of(features, targets), 0.0)
    design = np.hstack([features.numpy(), np.ones((len(features), 1))])
    theirs = np.linalg.lstsq(design, targets.numpy(), rcond=None)[0]
    assert ours.bias is not None
    np.testing.assert_allclose(ours.weight, theirs[:-1], atol=1e-8)
    np.testing.assert_allclose(ours.bias, theirs[-1], atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_the_ridge_is_that_of_sklearn(bias: bool) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, targets = rows()
    weights = torch.arange(len(features)) % 4.0  # some rows do not count
    share = (weights / weights.sum())[:, None]
    centre = (share * features).sum(0) if bias else torch.zeros(12)
    mean_diagonal = float((share * (features - centre) ** 2).sum(0).mean())
    alpha = 0.05 * mean_diagonal * float(weights.sum())
    ours = solve(Moments.of(features, targets, weights), 0.05, bias=bias)
    theirs = linear_model.Ridge(alpha=alpha, fit_intercept=bias, solver="cholesky")
    theirs.fit(features.numpy(), targets.numpy(), sample_weight=weights.numpy())
    np.testing.assert_allclose(ours.weight.T, theirs.coef_, atol=1e-8)
    if bias:
        np.testing.assert_allclose(ours.bias, theirs.intercept_, atol=1e-6)
    else:
        assert ours.bias is None


def test_batches_do_not_matter() -> None:
    features, targets = rows()
    whole = solve(Moments.of(features, targets), 1e-3)
    for size in (1, 7, 64):
        parts = solve(streamed(features, targets, size), 1e-3)
        torch.testing.assert_close(parts.weight, whole.weight, atol=1e-9, rtol=0)


def test_errors_come_from_moments_alone() -> None:
    features, targets = rows()
    linear = Linear(torch.ones(12, 3, dtype=torch.float64), torch.full((3,), 2.0).double())
    expected = ((features @ linear.weight + 2 - targets) ** 2).mean(0)
    torch.testing.assert_close(linear.errors(streamed(features, targets, 9)), expected)


def test_a_large_ridge_gives_what_it_shrinks_to() -> None:
    moments = Moments.of(*rows())
    towards = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(solve(moments, 1e12, towards=towards).weight, towards)
    assert float(solve(moments, 1e12).weight.abs().max()) < 1e-6


def test_features_that_never_vary_change_nothing() -> None:
    targets = rows()[1]
    linear = solve(Moments.of(torch.ones(200, 12), targets), 1e-3)
    assert not linear.weight.any()
    torch.testing.assert_close(linear.bias, targets.mean(0))


def test_the_ridge_is_chosen_per_map_and_never_worse_than_what_was_given() -> None:
    features, targets = rows(noise=0.5)
    held_out = Moments.of(*rows(80, seed=1, noise=0.5))
    moments = Moments.of(features, targets)
    exact = solve(Moments.of(*rows(2000, seed=5, noise=0.0)), 0.0)
    poor = Linear(torch.zeros(12, 1).double(), torch.zeros(1).double())
    good, fitted = fit(moments, held_out, [exact.columns(slice(0, 2)), poor])
    assert good.ridge is None and good.linear.weight.equal(exact.weight[:, :2])
    assert fitted.ridge is not None and fitted.error < fitted.given_error
    assert not good.few and fitted.linear.weight.shape == (12, 1)
    again = solve(moments + held_out, fitted.ridge).columns(slice(2, 3))
    torch.testing.assert_close(fitted.linear.weight, again.weight)


def test_with_fewer_rows_than_unknowns_it_shrinks_to_what_was_given() -> None:
    features, targets = rows(8)
    given = solve(Moments.of(*rows(2000, seed=5)), 0.0)
    near = Linear(given.weight + 0.01, given.bias)
    (result,) = fit(Moments.of(features, targets), Moments.of(*rows(80, seed=1)), [near])
    assert result.few
    assert float((result.linear.weight - near.weight).abs().max()) < 0.2  # to 0 it would be 1


@pytest.mark.parametrize("which", ["features", "targets", "weights"])
def test_nan_is_refused(which: str) -> None:
    features, targets = rows()
    given = {"features": features, "targets": targets, "weights": torch.ones(200)}
    given[which][3] = torch.nan
    with pytest.raises(DataError, match=r"NaN|finite"):
        Moments.of(**given)
