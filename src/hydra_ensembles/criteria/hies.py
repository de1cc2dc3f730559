"""HIES: head importance and low attention entropy, mixed (https://arxiv.org/abs/2510.13832)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.loaders import check_reiterable
from ..data.model_runs import collect_logits
from ..data.progress import progress_bar
from ..errors import DataError, HydraError
from ..heads.gates import gate
from ..heads.head_mask import HeadMask, HeadScores
from ..hosts import HostModel, host_model
from .attention_entropy import AttentionEntropy
from .criterion import CombinedScore, Criterion, Setting, criteria
from .gradients import HeadImportance

ALPHAS = tuple(i / 10 for i in range(11))
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
Quality = Callable[[Tensor, Tensor], float]


def mix(importance: HeadScores, entropy: HeadScores, alpha: float) -> HeadScores:
    """Return alpha * minmax(importance) + (1 - alpha) * (1 - minmax(entropy))."""
    mixed = alpha * importance.minmax() + (1 - alpha) * (1 - entropy.minmax())
    return HeadScores(mixed.rows, name=f"hies(alpha={alpha:g})")


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions: logits `[example, class]`, labels `[example]`."""
    return float((logits.argmax(-1) == labels).double().mean())


@dataclass(frozen=True)
class AlphaChoice:
    """The chosen alpha and the figures behind it.

    Attributes:
        alpha: The best; of equal ones the higher (more importance).
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
            f"{len(shares)} weights for {len(ratios)} ratios: expected one non-negative number per "
            "ratio, not all zero."
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


_SHANNON = AttentionEntropy()


@criteria.register("hies")
@dataclass(frozen=True)
class HeadImportanceEntropy(CombinedScore):
    """alpha * minmax(HIS) + (1 - alpha) * (1 - minmax(AE)), min-max over all heads of the model.

    Rank it over all layers together (`scores.top_k(keep, scope="model")`), in one shot; 32
    calibration examples are enough.

    Args:
        alpha: 1 means head importance only, 0 low entropy only; `"auto"` takes the best on the
            held-out data (see `choose_alpha`).
        entropy: Which attention entropy.
        alphas, ratios: What `"auto"` tries: candidates, at these pruning ratios.
    """

    alpha: float | str = 0.5
    entropy: AttentionEntropy = _SHANNON
    alphas: tuple[float, ...] = field(default=ALPHAS, repr=False)
    ratios: tuple[float, ...] = field(default=RATIOS, repr=False)

    def __post_init__(self) -> None:
        known = self.alpha == "auto" if isinstance(self.alpha, str) else 0 <= self.alpha <= 1
        if not known:
            raise HydraError(
                f'alpha={self.alpha!r} of hies: expected a number in [0, 1] or "auto".'
            )

    @property
    def parts(self) -> tuple[Criterion, ...]:
        """Head importance and attention entropy."""
        return HeadImportance(), self.entropy

    def combine(self, tables: Sequence[HeadScores], setting: Setting) -> HeadScores:
        """Mix the two tables; with `alpha="auto"` search alpha on the held-out data first."""
        importance, entropy = tables
        if not isinstance(self.alpha, str):
            return mix(importance, entropy, self.alpha)
        if setting.held_out is None:
            raise DataError(
                'hies with alpha="auto" chooses alpha on data that did not make the scores: pass '
                "held_out=<labelled data> to score_heads, or a number for alpha."
            )
        choice = choose_alpha(
            setting.host,
            importance,
            entropy,
            setting.held_out,
            alphas=self.alphas,
            ratios=self.ratios,
            progress=setting.progress,
        )
        return mix(importance, entropy, choice.alpha)
