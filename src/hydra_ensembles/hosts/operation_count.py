"""Multiply-adds of a host's own blocks, counted while they run as the host calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop

from .block import Block
from .block_calls import BlockCall, Inputs
from .head_removal import Cut, why_not_cut
from .multihead_attention import opened
from .probes import structure_of


@dataclass(frozen=True)
class BlockWeight:
    """Multiply-adds of one block.

    Attributes:
        whole: Multiply-adds with all heads.
        head: Saving per removed head; 0 if heads cannot be removed physically.
        heads, group: Number of heads, and size of the groups that are removed together.
        gated: Multiply-adds with heads gated off, if they cannot be removed: a gate before W_O may
            cost a product of its own (torchvision's windows).
    """

    whole: int
    head: float
    heads: int
    group: int
    gated: int | None = None

    def with_heads(self, places: Sequence[int]) -> int:
        """Return the multiply-adds with these heads kept."""
        if self.gated is not None and len(places) < self.heads:
            return self.gated
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
    """Return torch's operation counter, for totals, with CPU attention (older ones lack it)."""
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    unknown = {} if attention in flop_registry else {attention: _attention_on_cpu}
    counter = FlopCounterMode(display=False, custom_mapping=unknown)
    counter.mod_tracker = _OneTotal()  # type: ignore[assignment]
    return counter


def _attention_on_cpu(*args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop(*args, **kwargs))


_attention_on_cpu._get_raw = True  # type: ignore[attr-defined]  # sdpa_flop takes shapes itself


def multiply_adds(run: Callable[[], Any]) -> int:
    """Count the multiply-adds of a call: matrix products, convolutions and attention."""
    counter = operation_counter()
    with torch.no_grad(), counter:
        run()
    return counter.get_total_flops() // 2


def weigh_blocks(blocks: Sequence[Block], calls: Sequence[BlockCall]) -> list[BlockWeight]:
    """Count every block of a host, called as in one of the host's forward passes."""
    known: dict[Any, BlockWeight] = {}
    result = []
    for block, call in zip(blocks, calls, strict=True):
        key = (structure_of(block.module), str(_shapes(call.args)), str(_shapes(call.kwargs)))
        if key not in known:
            known[key] = _weigh(block, call)
        result.append(known[key])
    return result


def _weigh(block: Block, call: BlockCall) -> BlockWeight:
    site = block.attention
    heads, group = site.num_heads, max(1, site.num_heads // max(1, site.kv_heads))
    full = multiply_adds(lambda: call.call(block.module))
    remaining = tuple(range(group, heads))
    if not remaining or why_not_cut(block, remaining, call) is not None:
        with opened([site.module]):  # as it is where gates must reach W_O
            gated = multiply_adds(lambda: call.call(block.module))
        return BlockWeight(full, 0.0, heads, group, gated)
    pruned = Block.of(block.index, copy.deepcopy(block.module), block.family)
    Cut(remaining, remaining).apply_(pruned)
    saved = full - multiply_adds(lambda: call.call(pruned.module))
    return BlockWeight(full, saved / group, heads, group)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shapes(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_shapes(inner) for inner in value]
    return type(value).__name__


def cost_of_three_members(
    model: nn.Module, blocks: Sequence[Block], calls: Sequence[BlockCall], inputs: Inputs
) -> float | None:
    """Return the relative cost of three members with a third of the last block's heads each.

    Args:
        model: The host.
        blocks, calls: Its blocks, and how the host called them in one forward pass.
        inputs: The host's inputs in that pass.

    Returns:
        The cost relative to the host; None if it could not be counted.
    """
    try:
        weights = weigh_blocks(blocks, calls)
        whole = multiply_adds(lambda: model(*inputs[0], **inputs[1]))
    except Exception:  # a count is not worth an error
        return None
    last = weights[-1]
    groups = last.heads // last.group
    kept = range(max(1, round(groups / 3)) * last.group)
    return (whole - last.whole + 3 * last.with_heads(kept)) / max(1, whole)
