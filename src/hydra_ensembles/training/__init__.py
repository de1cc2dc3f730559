"""Training of hosts, members and branches: seeded, resumable, on accelerate."""

from __future__ import annotations

from .average import average_weights
from .branch import finetune_branch
from .distilling import distill
from .finetuning import finetune
from .loop import FinetunedMember, StepInfo
from .making_teachers import make_teachers
from .settings import Settings

__all__ = [
    "FinetunedMember",
    "Settings",
    "StepInfo",
    "average_weights",
    "distill",
    "finetune",
    "finetune_branch",
    "make_teachers",
]
