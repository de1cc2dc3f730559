"""Last-layer Laplace approximation, through laplace-torch (Daxberger et al., 2021)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .features import Featured, collect, need_classifier
from .task import Task, baselines, missing


class LaplaceHead(nn.Module):
    """A host whose last linear layer has a Gaussian posterior."""

    def __init__(self, host: Featured, posterior: Any) -> None:
        super().__init__()
        self.host = host
        self.posterior = posterior

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with log p(y|x), `[batch, class]`."""
        _, features = self.host(*args, **kwargs)
        with torch.enable_grad():  # the library takes Jacobians
            found = self.posterior(features.detach(), pred_type="glm", link_approx="probit")
        return found.detach().clamp_min(torch.finfo(found.dtype).tiny).log()


@baselines.register("laplace")
def laplace(host: nn.Module, task: Task, *, structure: str = "kron") -> nn.Module:
    """Put a Gaussian posterior on the last layer, and average its predictions in closed form.

    p(w | D) = N(w_host, (GGN + lambda I)^-1), with lambda by the marginal likelihood; the softmax's
    mean by the probit approximation: softmax(mean / sqrt(1 + pi / 8 * variance)) (Daxberger et al.,
    2021, "Laplace Redux"; Kristiadi et al., 2020). No training: one pass over `train`. The library
    is given the last layer and its inputs, which is the same approximation and works for any host.

    Args:
        host: A trained classifier that ends in a linear layer.
        task: Needs `train`, the data that the host was trained on.
        structure: Of the curvature: `kron`, `full` or `diag`.
    """
    known = ("kron", "full", "diag")
    if structure not in known:
        raise ValueError(f"structure={structure!r}: expected one of {', '.join(known)}.")
    data = task.need("train")
    path = need_classifier(host, data, task.name)
    featured = Featured(copy.deepcopy(host), path)
    _, features, labels = collect(featured, data, name="train", labels=True, progress=task.progress)
    assert labels is not None
    # Identity: the library looks for the last of several layers
    head = nn.Sequential(nn.Identity(), copy.deepcopy(featured.host.get_submodule(path)))
    with _quiet():
        try:
            from laplace import Laplace
        except ImportError as error:
            raise missing("laplace-torch") from error
        posterior = Laplace(
            head.eval(),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure=structure,
        )
        with torch.enable_grad():
            posterior.fit(DataLoader(TensorDataset(features, labels), batch_size=256))
            posterior.optimize_prior_precision(
                pred_type="glm", method="marglik", link_approx="probit"
            )
    return LaplaceHead(featured, posterior)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide two warnings of the library that say nothing about this use of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        warnings.filterwarnings("ignore", message="By default `link_approx`")
        yield
