"""Training of hosts, members and branches: seeded, resumable, on accelerate."""

from __future__ import annotations

from .branch_run import finetune_branch
from .distillation import distill
from .finetune_run import finetune
from .loop import FinetunedMember, StepInfo
from .settings import BRANCH, DISTILL, FINETUNE, Settings
from .teachers import make_teachers
from .weight_average import average_weights

__all__ = [
    "BRANCH",
    "DISTILL",
    "FINETUNE",
    "FinetunedMember",
    "Settings",
    "StepInfo",
    "average_weights",
    "distill",
    "finetune",
    "finetune_branch",
    "make_teachers",
]
