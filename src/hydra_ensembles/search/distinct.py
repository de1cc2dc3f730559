"""Distinct members: the next best mask when a search returns one that is already taken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from ..heads.masks import HeadMask, HeadScores


def count_masks(heads: Sequence[int], kept: Sequence[int], layers: Sequence[int]) -> int:
    """Count the masks that keep the given numbers of heads in these layers."""
    return math.prod(math.comb(heads[layer], kept[layer]) for layer in layers)


def next_best(
    scores: HeadScores, mask: HeadMask, layers: Sequence[int], taken: Collection[HeadMask]
) -> HeadMask | None:
    """Return the best-scoring mask that is not taken, or None if all are.

    Masks with the same number of heads per layer are tried in order of the score they lose against
    `mask` (sum of the kept heads' scores). One step swaps a kept head of a layer for another. Ties:
    the mask that was reached first, lower layers and heads first.

    Args:
        scores: Scores of all heads; higher = keep. `mask` keeps the highest of each layer.
        mask: The mask to start from.
        layers: Layers in which heads may be swapped.
        taken: Masks to exclude.
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
                    neighbour = best.with_layer(layer, changed)
                    if neighbour not in seen:
                        seen.add(neighbour)
                        given_up = float(scores[layer][out] - scores[layer][into])
                        heapq.heappush(queue, (loss + given_up, len(seen), neighbour))
    return None
