"""How much members differ: mean mutual information, disagreement and pairwise KL."""

from __future__ import annotations

from torch import Tensor

from ..uncertainty import disagreement, mutual_information, pairwise_kl
from .metrics_classification import MeanMetric


class MutualInformation(MeanMetric):
    """Mean of H(mean_m p_m) - mean_m H(p_m), in nats; 0 for one member."""

    higher_is_better = None

    def update(self, member_logits: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`."""
        self.add(mutual_information(member_logits))


class Disagreement(MeanMetric):
    """Mean share of member pairs that predict different classes; 0 for one member."""

    higher_is_better = None

    def update(self, member_logits: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`."""
        self.add(disagreement(member_logits))


class PairwiseKL(MeanMetric):
    """Mean KL divergence between ordered pairs of members, in nats; 0 for one member."""

    higher_is_better = None

    def update(self, member_logits: Tensor) -> None:
        """Add examples: member logits `[batch, member, class]`."""
        self.add(pairwise_kl(member_logits))
