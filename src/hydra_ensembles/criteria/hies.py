"""HIES: head importance and low attention entropy, together (arXiv 2510.13832)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import DataError, HydraError
from ..heads.masks import HeadScores
from .alpha import ALPHAS, RATIOS, choose_alpha, mix
from .base import CombinedScore, Criterion, Setting, criteria
from .entropy import AttentionEntropy
from .importance import HeadImportance

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
