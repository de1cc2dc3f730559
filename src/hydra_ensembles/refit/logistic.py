"""Linear readouts that follow probabilities: logistic regression on soft targets.

Least squares of logits weighs a class that nobody would choose as much as the two in question.
A readout is judged by its probabilities, so it is fitted to them. With q_t a host's probabilities
of example t, v_t the features of the trunk, each divided by its deviation, and CE cross-entropy,

    min over W, b of  mean_t CE(q_t, softmax(v_t W + b)) + PENALTY * I * |W|^2,

where I, in nats, is what the inputs tell about the targets: their mean entropy subtracted from the
entropy of their mean. So the penalty is relative to what there is to explain. The problem is
convex, and no network is run: L-BFGS takes seconds once the features are there. The fitted logits
are those of the host up to a constant per example, which probabilities do not see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .ridge import Linear
from .token_sums import judges_among

PENALTY = 2e-3
"""On calibration data of CLINC150, SST-2 and CIFAR-10 best for the mean of this fit and that to
logits, among 2e-4 and 2e-3."""
MORE = (0.1, 1, 10, 100)
"""Factors of the penalty that are tried on held-out rows where rows are few."""
FEW = 3
"""Rows per feature below which they are few."""
STEPS = 100
"""Most steps of L-BFGS."""
KEPT_BYTES = 2**30
"""Features that are kept; examples beyond it are not fitted."""


@dataclass(frozen=True)
class SoftFit:
    """A fitted readout.

    Attributes:
        linear: The map from features to logits.
        divergence: Mean Kullback-Leibler divergence of the targets from it, in nats.
        told: The same of the targets' mean, which knows nothing of the input: I above.
    """

    linear: Linear
    divergence: float
    told: float


@dataclass
class SoftRows:
    """Features [row, n] and the probabilities to follow [row, output, class]."""

    _features: list[Tensor] = field(default_factory=list)
    _targets: list[Tensor] = field(default_factory=list)
    _bytes: int = 0

    def add_(self, features: Tensor, targets: Tensor) -> None:
        """Keep the rows of a batch as long as there is room."""
        if self._bytes < KEPT_BYTES:
            self._features.append(features.float())
            self._targets.append(targets.float())
            self._bytes += self._features[-1].nbytes

    @property
    def rows(self) -> int:
        """Number of rows that are kept."""
        return sum(map(len, self._features))

    def fit(self) -> list[SoftFit]:
        """Fit one map per output."""
        features, targets = torch.cat(self._features), torch.cat(self._targets)
        centre, scale = features.mean(0), features.std(0)
        scale = torch.where(scale > 1e-6 * scale.mean(), scale, torch.inf)  # constants say nothing
        standard = (features - centre) / scale
        fits = []
        for target in targets.unbind(1):
            entropy, mean = -torch.special.xlogy(target, target).sum(-1).mean(), target.mean(0)
            told = float(-torch.special.xlogy(mean, mean).sum() - entropy)
            factor = 1.0
            if len(standard) < FEW * standard.shape[1]:
                factor = min(MORE, key=partial(_held_out_loss, standard, target, told))
            weight, bias = _fit(standard, target, PENALTY * told * factor)
            loss = float(_cross_entropy(standard, target, weight, bias) - entropy)
            weight = weight.double() / scale.double()[:, None]
            linear = Linear(weight, bias.double() - centre.double() @ weight)
            fits.append(SoftFit(linear, loss, told))
        return fits


def _cross_entropy(features: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return -(target * (features @ weight + bias).log_softmax(-1)).sum(-1).mean()


def _held_out_loss(features: Tensor, target: Tensor, told: float, factor: float) -> float:
    """Return the cross-entropy on every fifth row of a fit to the others."""
    judges = judges_among(0, len(features), 0)
    fitted = _fit(features[~judges], target[~judges], PENALTY * told * factor)
    return float(_cross_entropy(features[judges], target[judges], *fitted))


@torch.enable_grad()
def _fit(features: Tensor, target: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weights [n, class] and bias [class]."""
    weight = torch.zeros(features.shape[1], target.shape[1], requires_grad=True)
    bias = torch.zeros(target.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = _cross_entropy(features, target, weight, bias) + penalty * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()
