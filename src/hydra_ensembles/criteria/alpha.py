"""Choose the weight of importance against entropy in HIES on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import check_reiterable
from ..data.running import collect_logits, progress_bar
from ..errors import HydraError
from ..heads.gating import gate
from ..heads.masks import HeadMask, HeadScores
from ..hosts import HostModel, host_model

ALPHAS = tuple(i / 10 for i in range(11))
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
Quality = Callable[[Tensor, Tensor], float]


def mix(importance: HeadScores, entropy: HeadScores, alpha: float) -> HeadScores:
    """Return alpha * minmax(importance) + (1 - alpha) * (1 - minmax(entropy))."""
    mixed = alpha * importance.minmax() + (1 - alpha) * (1 - entropy.minmax())
    return HeadScores(mixed.rows, name=f"hies(alpha={alpha:g})")


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of right predictions: logits `[example, class]`, labels `[example]`."""
    return float((logits.argmax(-1) == labels).double().mean())


@dataclass(frozen=True)
class AlphaChoice:
    """The chosen alpha and the figures that chose it.

    Attributes:
        alpha: The best, ties to the higher (more importance).
        areas: Weighted area under quality over pruning ratios, per alpha.
        quality: Quality at each ratio, per alpha.
        ratios: The pruning ratios.
    """

    alpha: float
    areas: dict[float, float]
    quality: dict[float, list[float]] = field(repr=False)
    ratios: tuple[float, ...] = RATIOS


def choose_alpha(
    model: nn.Module | HostModel,
    importance: HeadScores,
    entropy: HeadScores,
    held_out: Iterable[Any],
    *,
    alphas: Sequence[float] = ALPHAS,
    ratios: Sequence[float] = RATIOS,
    weights: Sequence[float] | None = None,
    quality: Quality = accuracy,
    progress: bool = True,
) -> AlphaChoice:
    """Choose HIES's alpha by the weighted area under quality over pruning ratios.

    area(alpha) = sum_r w_r quality(model pruned to ratio r by HIES(alpha)), sum_r w_r = 1. The
    paper does not give the weights; ours grow with the ratio, w_r ~ r, since near 0 every order of
    heads gives about the same quality. Equal masks are evaluated once.

    Args:
        model: The host model.
        importance: Table of `his`.
        entropy: Table of `entropy`.
        held_out: Labelled data that did not make the tables.
        alphas: Candidates.
        ratios: Shares of all heads that are pruned.
        weights: One weight per ratio; proportional to the ratio by default.
        quality: A function of logits `[example, class]` and labels; higher is better.
        progress: Show a bar on a terminal.
    """
    host = host_model(model)
    check_reiterable(held_out, name="held_out")
    shares = torch.tensor(list(weights or ratios), dtype=torch.float64)
    if len(shares) != len(ratios) or not bool((shares >= 0).all()) or not float(shares.sum()) > 0:
        raise HydraError(
            f"{len(shares)} weights for {len(ratios)} ratios: expected one number that is not "
            "negative for each ratio, not all zero."
        )
    masks = {
        alpha: [mix(importance, entropy, alpha).top_k(1 - float(r), scope="model") for r in ratios]
        for alpha in alphas
    }
    known: dict[HeadMask, float] = {}
    distinct = dict.fromkeys(mask for row in masks.values() for mask in row)
    for mask in progress_bar(distinct, description="alpha", enabled=progress, total=len(distinct)):
        with gate(host, mask):
            logits, labels = collect_logits(host.model, held_out, name="held_out", need_labels=True)
        assert labels is not None
        known[mask] = quality(logits.mean(1), labels)
    table = {alpha: [known[mask] for mask in row] for alpha, row in masks.items()}
    areas = {
        alpha: float((shares * torch.tensor(row, dtype=torch.float64)).sum() / shares.sum())
        for alpha, row in table.items()
    }
    best = max(areas, key=lambda alpha: (areas[alpha], alpha))
    return AlphaChoice(best, areas, table, tuple(ratios))
