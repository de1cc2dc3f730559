"""Fine-tuning of hosts, pruned members and rivals: seeded, resumable, on accelerate."""

from __future__ import annotations

from .branch import finetune_branch
from .finetune import FinetunedMember, StepInfo, finetune

__all__ = ["FinetunedMember", "StepInfo", "finetune", "finetune_branch"]
