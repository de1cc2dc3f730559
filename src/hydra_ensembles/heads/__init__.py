"""Which heads: masks, scores, gates, physical pruning, and the plan of streams."""

from .gates import gate as gate
from .gates import prune_heads_ as prune_heads_
from .gates import prune_units_ as prune_units_
from .head_mask import HeadMask as HeadMask
from .head_mask import HeadScores as HeadScores
from .unit_mask import UnitMask as UnitMask
from .unit_scores import UnitScores as UnitScores
