"""Which heads: masks, scores, gates, physical pruning, and the plan of streams."""

from .gating import gate as gate
from .gating import prune_heads_ as prune_heads_
from .masks import HeadMask as HeadMask
from .masks import HeadScores as HeadScores
