"""The closed form of last-layer Laplace against laplace-torch, and what it is for: many classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.errors import DataError
from hydra_ensembles.research.rivals import make_baseline, relative_cost
from hydra_ensembles.research.rivals.laplace import KronVariance, LaplaceHead, fit_posterior
from hydra_ensembles.research.rivals.parts import Featured
from hydra_ensembles.uncertainty import energy

from .quadrants import TEST, TRAIN, VALIDATION, host, logits

IMAGES = TEST[0][0]


def problem(classes: int, *, width: int = 6, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(width, classes, bias=bias)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draws)
    features = 2 * torch.randn(3 * classes, width, generator=draws)
    labels = torch.distributions.Categorical(logits=layer(features)).sample()
    return layer, features, labels


@pytest.mark.parametrize("bias", [True, False])
def test_it_predicts_what_laplace_torch_predicts(bias: bool) -> None:
    layer, features, labels = problem(5, bias=bias)
    posterior = fit_posterior(layer, features, labels)
    far = 3 * features
    with torch.enable_grad():  # the library takes Jacobians
        _, covariance = posterior._glm_predictive_distribution(far)
        expected = posterior(far, pred_type="glm", link_approx="probit")
    variance = KronVariance(posterior, layer)
    torch.testing.assert_close(
        variance(far), covariance.diagonal(dim1=1, dim2=2), rtol=1e-4, atol=1e-5
    )
    rival = LaplaceHead(Featured(nn.Sequential(nn.Identity(), layer), "1"), variance)
    torch.testing.assert_close(logits(rival, far).softmax(-1), expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(expected, layer(far).softmax(-1), atol=1e-2)  # it does something


def test_many_classes_need_no_jacobians() -> None:
    layer, features, labels = problem(200, width=20)
    model = nn.Sequential(nn.Identity(), layer)
    rival = make_baseline("laplace", model, train=[(features, labels)], progress=False)
    # by hand for one class: its weights' and its bias's part of the posterior
    posterior = fit_posterior(layer, features, labels)
    jacobian = torch.zeros(1, 1, 200 * 21)
    jacobian[0, 0, 7 * 20 : 8 * 20], jacobian[0, 0, 200 * 20 + 7] = features[0], 1.0
    expected = posterior.functional_variance(jacobian)[0, 0, 0]
    torch.testing.assert_close(rival.variance(features[:1])[0, 7], expected, rtol=1e-3, atol=1e-6)
    # width^2 + classes * width + classes^2 beside the layer's classes * width: little for a network
    cost = relative_cost(rival, model, features).multiply_adds
    assert cost == pytest.approx(1 + 20 / 200 + 1 + 200 / 20)


@pytest.mark.parametrize("bias", [True, False])
def test_factors_are_those_of_laplace_torch(bias: bool) -> None:
    from laplace import Laplace

    layer, features, labels = problem(8, bias=bias)
    ours = fit_posterior(layer, features, labels)
    head = nn.Sequential(nn.Identity(), layer)
    theirs = Laplace(head, "classification", "last_layer", "kron")
    parts = TensorDataset(features, labels)
    theirs.fit(DataLoader(parts, batch_size=10))  # batches change nothing
    theirs.prior_precision = ours.prior_precision
    torch.testing.assert_close(ours.loss, theirs.loss)
    marginals = [one.log_marginal_likelihood() for one in (ours, theirs)]
    torch.testing.assert_close(*marginals, rtol=1e-4, atol=1e-4)
    variances = [KronVariance(one, layer)(features) for one in (ours, theirs)]
    torch.testing.assert_close(*variances, rtol=1e-3, atol=1e-5)


def test_laplace_is_less_sure_far_away_and_agrees_on_the_class() -> None:
    rival = make_baseline("laplace", host(), train=TRAIN, progress=False)
    for images in (IMAGES, 5 * IMAGES):
        plain, found = logits(host(), images).softmax(-1), logits(rival, images).softmax(-1)
        assert (found.amax(-1) < plain.amax(-1) + 1e-6).all()
    assert (found.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9
    assert energy(logits(rival, images)[:, None]).std() > 0.1  # logits, not log probabilities


def test_a_prior_by_validation_is_the_best_of_its_grid() -> None:
    data: dict[str, Any] = {
        "train": TRAIN[:1],
        "validation": VALIDATION,
        "progress": False,
    }  # few: too wide
    by_marginal = make_baseline("laplace", host(), **data)
    by_validation = make_baseline("laplace", host(), options={"prior": "validation"}, **data)
    images, labels = (torch.cat(parts) for parts in zip(*VALIDATION, strict=True))
    nll = [F.cross_entropy(logits(m, images), labels) for m in (by_marginal, by_validation, host())]
    assert nll[1] <= nll[0] and nll[1] <= nll[2] + 1e-3
    with pytest.raises(DataError, match="needs validation data"):
        make_baseline("laplace", host(), train=TRAIN, options={"prior": "validation"})
    with pytest.raises(ValueError, match=r"Unknown prior 'flat'. Known: marginal-likelihood"):
        make_baseline("laplace", host(), train=TRAIN, options={"prior": "flat"})


def test_it_is_copied_like_any_module() -> None:
    rival = make_baseline("laplace", host(), train=TRAIN, progress=False)
    assert torch.equal(logits(copy.deepcopy(rival), IMAGES), logits(rival, IMAGES))
    assert not any(buffer.requires_grad for buffer in rival.buffers())
