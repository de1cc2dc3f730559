"""Attention entropy: how widely a head looks (Zhai et al., 2023; HIES, arXiv 2510.13832)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .attention import AttentionView
from .attention_entropy import row_entropies
from .base import AttentionScore, criteria
from .entropy_kinds import EntropyKind


@criteria.register("entropy")
@dataclass(frozen=True)
class AttentionEntropy(AttentionScore):
    """Mean normalised entropy of a head's rows of attention, in [0, 1]; **lower = keep**.

    AE_h = E_x [ mean_t Entropy(alpha_t) / log n_t ], n_t the number of keys that row t sees: the
    unpadded length n, or the length of the context in a causal model. Rows of padding and rows
    with one key do not count; attention is never pooled before the entropy. A focused head (low
    entropy) is kept, a head that looks everywhere is pruned: use `ranked("entropy", scores)` or
    `hies` with alpha = 0 to rank by it.

    Args:
        kind: `"shannon"`, `"renyi"`, `"tsallis"` or `"min"`; all are divided by their greatest
            value.
        order: The order of Renyi's and Tsallis's entropy.
    """

    lower_is_kept: ClassVar[bool] = True

    kind: str = "shannon"
    order: float = 2.0

    def __post_init__(self) -> None:
        EntropyKind(self.kind, self.order)  # refuses what it does not know, early

    def values(self, view: AttentionView) -> Tensor:
        """Return each sample's entropy `[batch, heads]`; NaN where no row counts."""
        kind = EntropyKind(self.kind, self.order)
        greatest = kind.greatest(view.visible_keys().clamp_min(2.0))
        shares = (row_entropies(view, kind) / greatest).clamp_max(1.0)
        counted = view.counted_rows().expand_as(shares)
        return torch.where(counted, shares, 0.0).double().sum(-1) / counted.sum(-1)
