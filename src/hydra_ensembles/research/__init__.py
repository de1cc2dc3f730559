"""What papers need and products do not: rivals, sweeps, the shift gap, the frontier, head roles.

Only the command line and experiments import this room.
"""

from .cost_frontier import frontier as frontier
from .feature_detectors import evaluate_features as evaluate_features
from .figures import plot_benchmark as plot_benchmark
from .figures import plot_effects as plot_effects
from .figures import plot_frontier as plot_frontier
from .figures import plot_growth as plot_growth
from .figures import plot_head_scores as plot_head_scores
from .figures import plot_members as plot_members
from .figures import plot_overlaps as plot_overlaps
from .figures import plot_prune_sweep as plot_prune_sweep
from .figures import plot_rank_correlation as plot_rank_correlation
from .head_roles import head_map as head_map
from .head_roles import overlaps as overlaps
from .pruning_sweep import prune_sweep as prune_sweep
from .rivals import MemberStack as MemberStack
from .rivals import baselines as baselines
from .rivals import make_baseline as make_baseline
from .rivals import relative_cost as relative_cost
from .shift_gap import pruning_shift_gap as pruning_shift_gap
