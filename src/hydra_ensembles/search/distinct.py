"""Members that differ: the next best mask where a search returns one that is taken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from ..heads.masks import HeadMask, HeadScores


def count_masks(heads: Sequence[int], kept: Sequence[int], layers: Sequence[int]) -> int:
    """Count the masks that keep so many heads of these layers."""
    return math.prod(math.comb(heads[layer], kept[layer]) for layer in layers)


def next_best(
    scores: HeadScores, mask: HeadMask, layers: Sequence[int], taken: Collection[HeadMask]
) -> HeadMask | None:
    """Return the mask nearest to `mask` by score that is not taken, or None when all are.

    Masks with as many heads in every layer are tried in the order of the score that they give up:
    sum of the scores of the heads kept, against that of `mask`. One step exchanges a kept head of
    a layer for another. Ties go to the mask that was reached first, lower layers and heads first.

    Args:
        scores: Of all heads; higher = keep. `mask` keeps the highest of each layer.
        mask: The mask that is taken.
        layers: Layers in which heads may be exchanged.
        taken: Masks that are not wanted.
    """
    queue: list[tuple[float, int, HeadMask]] = [(0.0, 0, mask)]
    seen = {mask}
    while queue:
        loss, _, best = heapq.heappop(queue)
        if best not in taken:
            return best
        for layer in layers:
            row = best[layer]
            for out in row.nonzero().flatten().tolist():
                for into in (~row).nonzero().flatten().tolist():
                    changed = row.clone()
                    changed[out], changed[into] = False, True
                    near = best.with_layer(layer, changed)
                    if near not in seen:
                        seen.add(near)
                        given_up = float(scores[layer][out] - scores[layer][into])
                        heapq.heappush(queue, (loss + given_up, len(seen), near))
    return None
