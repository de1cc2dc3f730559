"""Entropies of a distribution over keys, and their greatest values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import HydraError
from ..registry import check_name

KINDS = ("shannon", "renyi", "tsallis", "min")


@dataclass(frozen=True)
class EntropyKind:
    """An entropy of rows of log-probabilities.

    | kind | entropy of p | greatest, for n keys |
    |---|---|---|
    | `shannon` | -sum p log p | log n |
    | `renyi`, order a | log(sum p^a) / (1 - a) | log n |
    | `tsallis`, order a | (1 - sum p^a) / (a - 1) | (1 - n^(1 - a)) / (a - 1) |
    | `min` | -log max p (Renyi of infinite order) | log n |

    Renyi and Tsallis of order 1 are Shannon's.

    Args:
        name: One of the table.
        order: The order a > 0 of Renyi's and Tsallis's entropy.
    """

    name: str = "shannon"
    order: float = 2.0

    def __post_init__(self) -> None:
        check_name("entropy", self.name, KINDS)
        if not (self.order > 0 and math.isfinite(self.order)):
            raise HydraError(
                f"The order of an entropy is {self.order}: expected a positive number; "
                'for an infinite order use kind="min".'
            )

    @property
    def is_shannon(self) -> bool:
        """Whether this is Shannon's entropy, for which there is a path without any matrix."""
        return self.name == "shannon" or (self.name in ("renyi", "tsallis") and self.order == 1)

    def __call__(self, log_probabilities: Tensor) -> Tensor:
        """Return the entropy of every row, `[..., keys]` to `[...]`; hidden keys are -inf."""
        logs = log_probabilities
        if self.is_shannon:
            # 0 log 0 = 0: a hidden key's log is -inf, which times 0 would be NaN
            return -logs.exp().mul_(logs.clamp_min(-1e30)).sum(-1)
        if self.name == "min":
            return -logs.amax(-1)
        power = (logs * self.order).logsumexp(-1)  # log sum p^a
        if self.name == "renyi":
            return power / (1 - self.order)
        return -power.expm1() / (self.order - 1)

    def greatest(self, keys: Tensor) -> Tensor:
        """Return the entropy of a uniform distribution over that many keys."""
        logs = keys.log()
        if self.name == "tsallis" and not self.is_shannon:
            return -((1 - self.order) * logs).expm1() / (self.order - 1)
        return logs
