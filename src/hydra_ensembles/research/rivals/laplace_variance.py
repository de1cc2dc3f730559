"""Variances of logits under a Gaussian over the last layer, in closed form: no Jacobians.

The logit of class c is w_c phi + b_c, so its Jacobian is phi at the weights of c and one at its
bias, and zero elsewhere. laplace-torch forms it for all classes: classes x parameters numbers an
example, 1,000 x 193,000 for ImageNet and DeiT-tiny.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def logit_variance(posterior: Any, layer: nn.Linear, *, structure: str) -> nn.Module:
    """Return a module from features `[batch, width]` to variances `[batch, class]`.

    Args:
        posterior: What laplace-torch fitted to the last layer.
        layer: The last layer.
        structure: Of the posterior's precision: `kron`, `full` or `diag`.
    """
    makers = {"kron": KronVariance, "full": FullVariance, "diag": DiagVariance}
    return makers[structure](posterior, layer)


class KronVariance(nn.Module):
    """For a precision B (x) A + lambda I with eigenvalues b_i a_j + lambda, and B + lambda I.

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


class DiagVariance(nn.Module):
    """For independent weights: var_c = sum_j phi_j^2 var(w_cj) + var(b_c)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, posterior: Any, layer: nn.Linear) -> None:
        super().__init__()
        variance, size = posterior.posterior_variance, layer.weight.numel()
        self.register_buffer("weight", variance[:size].view_as(layer.weight))
        bias = variance[size:] if layer.bias is not None else variance.new_zeros(layer.out_features)
        self.register_buffer("bias", bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return variances `[batch, class]`."""
        return features.square() @ self.weight.T + self.bias


class FullVariance(nn.Module):
    """For any covariance S: var_c = phi^T S_cc phi, with the bias as a weight of a constant one."""

    covariance: Tensor

    def __init__(self, posterior: Any, layer: nn.Linear) -> None:
        super().__init__()
        classes, width = layer.weight.shape
        rows = torch.arange(classes * width).view(classes, width)
        if layer.bias is not None:
            rows = torch.cat([rows, classes * width + torch.arange(classes)[:, None]], 1)
        covariance = posterior.posterior_covariance
        blocks = torch.stack([covariance[one][:, one] for one in rows.to(covariance.device)])
        self.register_buffer("covariance", blocks)

    def forward(self, features: Tensor) -> Tensor:
        """Return variances `[batch, class]`."""
        if self.covariance.shape[-1] > features.shape[-1]:
            features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        return torch.einsum("bi,cij,bj->bc", features, self.covariance, features)
