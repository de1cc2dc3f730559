"""Rivals: what people would use instead, each one call from a pretrained host.

One kind of rival per file: formula, paper, and what differs from it. Maintained libraries do
the work where they exist (torch-uncertainty, peft, laplace-torch: the extra `rivals`).
"""

from __future__ import annotations

from . import (  # noqa: F401  (they register themselves)
    batch_ensemble,
    deep_ensemble,
    hydra,
    laplace,
    lora_ensemble,
    mc_dropout,
    outlier_head,
    packed_ensemble,
    single,
    vilu,
)
from .parts import MemberStack, RelativeCost, relative_cost
from .task import Task, baselines, make_baseline

__all__ = ["MemberStack", "RelativeCost", "Task", "baselines", "make_baseline", "relative_cost"]
