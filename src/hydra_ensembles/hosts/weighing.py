"""Multiply-adds of a host's own blocks, counted while they run as the host calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop

from .block import Block
from .calling import BlockCall, Host
from .cutting import Cut, why_not_cut
from .probe import structure_of


@dataclass(frozen=True)
class BlockWeight:
    """Multiply-adds of one block.

    Attributes:
        whole: With all its heads.
        head: What one head less saves; 0 where heads cannot be removed physically.
        heads, group: Number of heads, and of heads that can only be removed together.
    """

    whole: int
    head: float
    heads: int
    group: int

    def with_heads(self, places: Sequence[int]) -> int:
        """Return the multiply-adds with these heads kept."""
        groups = len({place // self.group for place in places})
        return round(self.whole - self.head * (self.heads - groups * self.group))


class _OneTotal:
    """Stands in for the counter's own list of the modules that run.

    That one asks every input of a module for its gradient, which fails without gradients for a
    slice of a parameter (DeBERTa's relative positions).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> _OneTotal:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


def operation_counter() -> FlopCounterMode:
    """Return torch's counter of operations, for totals; older ones lack attention on the CPU."""
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    unknown = {} if attention in flop_registry else {attention: _attention_on_cpu}
    counter = FlopCounterMode(display=False, custom_mapping=unknown)
    counter.mod_tracker = _OneTotal()  # type: ignore[assignment]
    return counter


def _attention_on_cpu(*args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop(*args, **kwargs))


_attention_on_cpu._get_raw = True  # type: ignore[attr-defined]  # sdpa_flop takes shapes itself


def multiply_adds(run: Callable[[], Any]) -> int:
    """Count the multiply-adds of what runs: matrix products, convolutions and attention."""
    counter = operation_counter()
    with torch.no_grad(), counter:
        run()
    return counter.get_total_flops() // 2


def weigh_blocks(host: Host, calls: Sequence[BlockCall]) -> list[BlockWeight]:
    """Weigh every block of a host, called as in one of its forward passes."""
    known: dict[Any, BlockWeight] = {}
    result = []
    for block, call in zip(host.blocks, calls, strict=True):
        key = (structure_of(block.module), str(_shapes(call.args)), str(_shapes(call.kwargs)))
        if key not in known:
            known[key] = _weigh(block, call)
        result.append(known[key])
    return result


def _weigh(block: Block, call: BlockCall) -> BlockWeight:
    site = block.attention
    heads, group = site.num_heads, max(1, site.num_heads // max(1, site.kv_heads))
    whole = multiply_adds(lambda: call.call(block.module))
    there = tuple(range(group, heads))
    if not there or why_not_cut(block, there, call) is not None:
        return BlockWeight(whole, 0.0, heads, group)
    less = Block.of(block.index, copy.deepcopy(block.module), block.family)
    Cut(there, there).apply_(less)
    saved = whole - multiply_adds(lambda: call.call(less.module))
    return BlockWeight(whole, saved / group, heads, group)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shapes(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_shapes(inner) for inner in value]
    return type(value).__name__


def three_members(host: Host) -> float | None:
    """Count three members of a third of the heads each in the last block, against the host.

    None when the host could not be run.
    """
    seen = host.seen
    if seen is None:
        return None
    calls, inputs = seen
    try:
        weights = weigh_blocks(host, calls)
        whole = multiply_adds(lambda: host.model(*inputs[0], **inputs[1]))
    except Exception:  # a count is not worth an error
        return None
    last = weights[-1]
    groups = last.heads // last.group
    kept = range(max(1, round(groups / 3)) * last.group)
    return (whole - last.whole + 3 * last.with_heads(kept)) / max(1, whole)
