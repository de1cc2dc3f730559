"""A pool of candidate masks above a shared trunk: all of them where few heads are, else samples.

Candidates come from circuits, from criteria (Taylor, HIES), at random, and from mutations of those
that selection liked. They draw the rows of lower branched layers from a small set, so that members
can share streams, which is what keeps an ensemble within its budget.
"""

from __future__ import annotations

import itertools
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
    size: int = 400,
    tables: Mapping[str, HeadScores] | None = None,
    stems: int | None = None,
    seed: int = 0,
) -> dict[HeadMask, str]:
    """Return candidate masks and where each comes from; the unpruned host is the first.

    Args:
        host: The host model.
        layers: Layers in which candidates differ; all heads are kept below.
        size: Number of candidates, at most.
        tables: Scores of heads by name (higher = keep): their top heads at several ratios.
        stems: Candidates share this many choices of heads below the last layer. Whole blocks run
            once per stem, so that few stems make a large pool cheap. None: no such limit.
        seed: Of the random ones.
    """
    full = HeadMask.full(host)
    pool: dict[HeadMask, str] = {full: "host"}
    whole = 1
    for layer in layers:
        whole *= 2 ** min(host.head_counts[layer], 30) - 1
    if whole <= size:
        every = (all_rows(host.head_counts[layer]) for layer in layers)
        for choice in itertools.product(*every):
            pool.setdefault(_with(full, layers, choice), "all")
        return pool
    generator = torch.Generator().manual_seed(seed)
    for name, scores in (tables or {}).items():
        for keep in KEEP:
            kept = scores.top_k(keep)
            for first in range(len(layers)):  # pruned from the top down
                upper = layers[first:]
                pool.setdefault(_with(full, upper, [kept[layer] for layer in upper]), name)
    lower = {layer: _few_rows(host, layer, pool, generator) for layer in layers[:-1]}
    if stems is not None:
        return _on_stems(pool, layers, lower, stems=stems, size=size, generator=generator)
    while len(pool) < min(size, whole):
        rows = [_pick(lower[layer], generator) for layer in layers[:-1]]
        rows.append(_random_row(host.head_counts[layers[-1]], generator))
        pool.setdefault(_with(full, layers, rows), "random")
    return pool


def _on_stems(
    pool: Mapping[HeadMask, str],
    layers: Sequence[int],
    lower: Mapping[int, Sequence[Tensor]],
    *,
    stems: int,
    size: int,
    generator: torch.Generator,
) -> dict[HeadMask, str]:
    """Return a pool on few stems: those of the given masks first, then random ones."""
    full = next(iter(pool))
    found: dict[tuple[tuple[bool, ...], ...], HeadMask] = {}
    for mask in [mask for mask in pool if mask is full or "random" not in pool[mask]]:
        if len(found) < max(1, stems // 2):
            found.setdefault(_stem(mask, layers), mask)
    for _ in range(20 * stems):
        if len(found) >= stems or not lower:
            break
        mask = _with(full, layers[:-1], [_pick(lower[layer], generator) for layer in layers[:-1]])
        found.setdefault(_stem(mask, layers), mask)
    result = {mask: name for mask, name in pool.items() if _stem(mask, layers) in found}
    bases = list(found.values())
    heads = full.shape[layers[-1]]
    for _ in range(20 * size):
        if len(result) >= size:
            break
        base = bases[int(torch.randint(len(bases), (), generator=generator))]
        mask = base.with_layer(layers[-1], _random_row(heads, generator))
        result.setdefault(mask, "random")
    return result


def _stem(mask: HeadMask, layers: Sequence[int]) -> tuple[tuple[bool, ...], ...]:
    """Return a mask's heads below the last layer."""
    return tuple(tuple(mask[layer].tolist()) for layer in layers[:-1])


def _few_rows(
    host: HostModel, layer: int, pool: Mapping[HeadMask, str], generator: torch.Generator
) -> list[Tensor]:
    """Return the rows of a lower layer: the full one mostly, those of scores, and random ones."""
    heads = host.head_counts[layer]
    if heads <= 3:
        return all_rows(heads)
    rows = [torch.ones(heads, dtype=torch.bool)]
    rows += [mask[layer] for mask in pool if not bool(mask[layer].all())][:8]
    return rows + [_random_row(heads, generator) for _ in range(8)]


def _pick(rows: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Take the full row every other time, else any."""
    if bool(torch.rand((), generator=generator) < 0.5):
        return rows[0]
    return rows[int(torch.randint(len(rows), (), generator=generator))]


def _random_row(heads: int, generator: torch.Generator) -> Tensor:
    low, high = keep_count(0.25, heads), max(1, heads - 1)
    count = int(torch.randint(min(low, high), high + 1, (), generator=generator))
    row = torch.zeros(heads, dtype=torch.bool)
    row[torch.randperm(heads, generator=generator)[:count]] = True
    return row


def mutations(
    parents: Sequence[HeadMask],
    layers: Sequence[int],
    *,
    count: int,
    known: Mapping[HeadMask, str],
    seed: int = 0,
) -> list[HeadMask]:
    """Flip one or two heads of the branched layers of parents; return masks not known yet."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[HeadMask, None] = {}
    for _ in range(20 * count):
        if len(found) >= count or not parents:
            break
        parent = parents[int(torch.randint(len(parents), (), generator=generator))]
        mask = parent
        for _ in range(1 + int(torch.rand((), generator=generator) < 0.4)):
            layer = layers[int(torch.randint(len(layers), (), generator=generator))]
            row = mask[layer].clone()
            head = int(torch.randint(len(row), (), generator=generator))
            row[head] = ~row[head]
            if bool(row.any()):
                mask = mask.with_layer(layer, row)
        if mask not in known and mask not in found:
            found[mask] = None
    return list(found)


def _with(full: HeadMask, layers: Sequence[int], rows: Sequence[Tensor]) -> HeadMask:
    mask = full
    for layer, row in zip(layers, rows, strict=True):
        mask = mask.with_layer(layer, row)
    return mask
