"""A pool of candidate masks above a shared trunk: all masks if there are few heads, else samples.

Candidates come from criteria (Taylor, HIES) and from chance. They share a few *stems*: choices of
heads below the last layer. Members on one stem share its stream, which keeps an ensemble within its
budget, and whole blocks run once per stem, which makes a large pool cheap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..heads.head_mask import HeadMask, HeadScores, keep_count
from ..hosts import HostModel

KEEP = (5 / 6, 2 / 3, 0.5, 1 / 3)


def all_rows(heads: int) -> list[Tensor]:
    """Return every row that keeps a head, the full one first."""
    rows = [torch.tensor(bits).bool() for bits in itertools.product((1, 0), repeat=heads)]
    return rows[:-1]


def make_pool(
    host: HostModel,
    layers: Sequence[int],
    *,
    size: int = 96,
    stems: int = 8,
    tables: Mapping[str, HeadScores] | None = None,
    seed: int = 0,
) -> dict[HeadMask, str]:
    """Return candidate masks and their origins; the unpruned host is the first.

    Args:
        host: The host model.
        layers: Layers in which candidates differ; all heads are kept below.
        size: Largest number of candidates.
        stems: Largest number of stems that they share.
        tables: Scores of heads by name (higher = keep): their top heads at several ratios.
        seed: Seed of the random masks.
    """
    full = HeadMask.full(host)
    pool: dict[HeadMask, str] = {full: "host"}
    if math.prod(2 ** host.head_counts[layer] - 1 for layer in layers) <= size:
        every = (all_rows(host.head_counts[layer]) for layer in layers)
        for choice in itertools.product(*every):
            pool.setdefault(_with(full, layers, choice), "all")
        return pool
    for name, scores in (tables or {}).items():
        for keep in KEEP:
            kept = scores.top_k(keep)
            for first in range(len(layers)):  # pruned from the top down
                upper = layers[first:]
                pool.setdefault(_with(full, upper, [kept[layer] for layer in upper]), name)
    generator = torch.Generator().manual_seed(seed)
    lower = {layer: _few_rows(host, layer, pool, generator) for layer in layers[:-1]}
    bases: dict[tuple[tuple[bool, ...], ...], HeadMask] = {}
    for mask in pool:
        if len(bases) < max(1, stems // 2):
            bases.setdefault(_stem(mask, layers), mask)
    for _ in range(20 * stems):
        if len(bases) >= stems or not lower:
            break
        picked = []
        for layer in layers[:-1]:  # the full row half of the time, else any row
            whole = bool(torch.rand((), generator=generator) < 0.5)
            count = len(lower[layer])
            place = 0 if whole else int(torch.randint(count, (), generator=generator))
            picked.append(lower[layer][place])
        mask = _with(full, layers[:-1], picked)
        bases.setdefault(_stem(mask, layers), mask)
    pool = {mask: name for mask, name in pool.items() if _stem(mask, layers) in bases}
    choices = list(bases.values())
    for _ in range(20 * size):
        if len(pool) >= size:
            break
        base = choices[int(torch.randint(len(choices), (), generator=generator))]
        row = _random_row(full.shape[layers[-1]], generator)
        pool.setdefault(base.with_layer(layers[-1], row), "random")
    return pool


def _stem(mask: HeadMask, layers: Sequence[int]) -> tuple[tuple[bool, ...], ...]:
    """Return a mask's heads below the last layer."""
    return tuple(tuple(mask[layer].tolist()) for layer in layers[:-1])


def _few_rows(
    host: HostModel, layer: int, pool: Mapping[HeadMask, str], generator: torch.Generator
) -> list[Tensor]:
    """Return the rows of a lower layer: the full row, those of scores, and random ones."""
    heads = host.head_counts[layer]
    if heads <= 3:
        return all_rows(heads)
    rows = [torch.ones(heads, dtype=torch.bool)]
    rows += [mask[layer] for mask in pool if not bool(mask[layer].all())][:8]
    return rows + [_random_row(heads, generator) for _ in range(8)]


def _random_row(heads: int, generator: torch.Generator) -> Tensor:
    low, high = keep_count(0.25, heads), max(1, heads - 1)
    count = int(torch.randint(min(low, high), high + 1, (), generator=generator))
    row = torch.zeros(heads, dtype=torch.bool)
    row[torch.randperm(heads, generator=generator)[:count]] = True
    return row


def _with(full: HeadMask, layers: Sequence[int], rows: Sequence[Tensor]) -> HeadMask:
    mask = full
    for layer, row in zip(layers, rows, strict=True):
        mask = mask.with_layer(layer, row)
    return mask
