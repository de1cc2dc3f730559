"""Fine-tuning of hosts, pruned members and rivals: seeded, resumable, on accelerate."""

from __future__ import annotations

from .average import average_weights
from .branch import finetune_branch
from .finetuning import FinetunedMember, StepInfo, finetune

__all__ = ["FinetunedMember", "StepInfo", "average_weights", "finetune", "finetune_branch"]
