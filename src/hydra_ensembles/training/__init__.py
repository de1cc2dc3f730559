"""Training of hosts, members and branches: seeded, resumable, on accelerate."""

from .branch_run import finetune_branch as finetune_branch
from .distillation import distill as distill
from .finetune_run import finetune as finetune
from .loop import FinetunedMember as FinetunedMember
from .loop import StepInfo as StepInfo
from .settings import BRANCH as BRANCH
from .settings import DISTILL as DISTILL
from .settings import FINETUNE as FINETUNE
from .settings import Settings as Settings
from .teachers import make_teachers as make_teachers
from .weight_average import average_weights as average_weights
