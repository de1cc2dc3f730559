"""Last-layer Laplace approximation, fitted by laplace-torch (Daxberger et al., 2021).

Variances of logits are in closed form: the logit of class c is w_c phi + b_c, so its Jacobian is
phi at the weights of c and one at its bias, and zero elsewhere. laplace-torch forms it for all
classes: classes x parameters numbers an example, 1,000 x 193,000 for ImageNet and DeiT-tiny.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ...registry import check_name, imported
from .parts import Featured, collect, need_classifier
from .task import Task, baselines

PRIORS = ("marginal-likelihood", "validation")
BATCH = 256
GRID = torch.logspace(-4, 6, 31)  # of lambda


class LaplaceHead(nn.Module):
    """A host whose last linear layer has a Gaussian posterior."""

    def __init__(self, host: Featured, variance: nn.Module) -> None:
        super().__init__()
        self.host = host
        self.variance = variance

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with logits `[batch, class]` whose softmax is the probit approximation."""
        logits, features = self.host(*args, **kwargs)
        return probit(logits, self.variance(features))


def probit(logits: Tensor, variance: Tensor) -> Tensor:
    """Return logits whose softmax approximates the mean softmax of Gaussian logits."""
    return logits / (1 + math.pi / 8 * variance).sqrt()


@baselines.register("laplace")
def laplace(host: nn.Module, task: Task, *, prior: str = "marginal-likelihood") -> nn.Module:
    """Put a Gaussian posterior on the last layer, and average its predictions in closed form.

    p(w | D) = N(w_host, (GGN + lambda I)^-1); the softmax's mean by the probit approximation:
    softmax(mean / sqrt(1 + pi / 8 * variance)) (Daxberger et al., 2021, "Laplace Redux", arXiv
    2106.14806; Kristiadi et al., 2020). No training: one pass over `train`. With far fewer examples
    than the host was trained on, the marginal likelihood gives too wide a posterior: choose lambda
    by validation.

    laplace-torch fits the last layer to its inputs, which is the same approximation and works for
    any host. The Kronecker factors and the logits' variances are computed here in closed form, with
    the library's result and without its passes and Jacobians, which do not fit a thousand classes:
    classes^2 numbers are kept, and as many multiply-adds done per example.

    Args:
        host: A trained classifier that ends in a linear layer.
        task: Needs `train`, the data that the host was trained on.
        prior: How lambda is chosen: by the `marginal-likelihood` of `train`, or by the NLL of
            `validation`.
    """
    check_name("prior", prior, PRIORS)
    data = task.need("train")
    held_out = task.need("validation") if prior == "validation" else None
    path = need_classifier(host, data, task.name)
    featured = Featured(copy.deepcopy(host), path)
    layer = featured.host.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    _, features, labels = collect(featured, data, name="train", labels=True, progress=task.progress)
    assert labels is not None
    posterior = fit_posterior(layer, features, labels)
    if held_out is not None:
        logits, features, labels = collect(
            featured, held_out, name="validation", labels=True, progress=task.progress
        )
        assert labels is not None
        grid, losses = GRID.to(features), []
        for precision in grid:
            posterior.prior_precision = precision
            variance = KronVariance(posterior, layer)(features)
            losses.append(float(F.cross_entropy(probit(logits, variance), labels)))
        posterior.prior_precision = grid[losses.index(min(losses))]
    return LaplaceHead(featured, KronVariance(posterior, layer))


def fit_posterior(layer: nn.Linear, features: Tensor, labels: Tensor) -> Any:
    """Return laplace-torch's posterior of a linear layer, its prior by the marginal likelihood."""
    # Identity: the library looks for the last of several layers
    head = nn.Sequential(nn.Identity(), copy.deepcopy(layer)).eval()
    loader = DataLoader(TensorDataset(features, labels), batch_size=BATCH)
    with warnings.catch_warnings():  # two that do not concern this use of the library
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        warnings.filterwarnings("ignore", message="By default `link_approx`")
        laplace_torch = imported("laplace", "This rival", "rivals")
        posterior = laplace_torch.Laplace(
            head,
            "classification",
            subset_of_weights="last_layer",
            hessian_structure="kron",
            backend=_linear_curvature(layer.bias is not None),
        )
        with torch.enable_grad():
            posterior.fit(loader)
            posterior.optimize_prior_precision(
                pred_type="glm", method="marglik", link_approx="probit"
            )
    return posterior


def _linear_curvature(bias: bool) -> Any:
    """Return the library's curvature with the Kronecker factors of a linear layer by formula.

    A = mean of phi phi^T, B = sum of diag(p) - p p^T. The library back-propagates once a class.
    """
    from laplace.curvature import CurvlinopsGGN
    from laplace.utils import Kron

    class LinearCurvature(CurvlinopsGGN):
        @torch.no_grad()
        def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Any]:
            logits = self.model(x)
            p = logits.softmax(-1)
            b = p.sum(0).diag() - p.T @ p
            factors: list[Any] = [[b, x.T @ x / N]]
            if bias:
                factors.append([b])
            return self.lossfunc(logits, y), Kron(factors)

    return LinearCurvature


class KronVariance(nn.Module):
    """Variances of logits `[batch, class]` from features `[batch, width]`.

    The precision is B (x) A + lambda I with eigenvalues b_i a_j + lambda, and B + lambda I, so
    var_c = sum_ij U_ci^2 (V^T phi)_j^2 / (b_i a_j + lambda) + sum_i U_ci^2 / (b_i + lambda), with
    the eigenvectors U of B `[class, class]` and V of A `[width, width]` (Ritter et al., 2018).
    """

    classes: Tensor
    inputs: Tensor
    inverse: Tensor
    bias: Tensor

    def __init__(self, posterior: Any, layer: nn.Linear) -> None:
        super().__init__()
        precision = posterior.posterior_precision
        (of_classes, of_inputs), (b, a) = precision.eigenvectors[0], precision.eigenvalues[0]
        self.register_buffer("classes", of_classes.square())
        self.register_buffer("inputs", of_inputs)
        self.register_buffer("inverse", 1 / (torch.outer(b, a) + precision.deltas[0]))
        bias = torch.zeros_like(b)
        if layer.bias is not None:
            of_bias, eigenvalues = precision.eigenvectors[1][0], precision.eigenvalues[1][0]
            bias = of_bias.square() @ (1 / (eigenvalues + precision.deltas[1]))
        self.register_buffer("bias", bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return variances `[batch, class]`."""
        along = (features @ self.inputs).square() @ self.inverse.T
        return along @ self.classes.T + self.bias
