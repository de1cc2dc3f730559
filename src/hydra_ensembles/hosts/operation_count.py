"""Multiply-adds, counted while a model runs: in total, by block, and of blocks with fewer heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop

from ..data.batches import move, split_batch
from ..data.eval_mode import in_eval
from ..data.model_runs import device_of
from ..errors import DataError
from .block import Block
from .block_calls import BlockCall, Inputs, take_call
from .head_removal import Cut, why_not_cut
from .multihead_attention import opened
from .probes import structure_of

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")


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
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator that no counter knows
    try:
        with torch.no_grad(), counter:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


def inputs_of(model: nn.Module, batch: Any) -> Inputs:
    """Return a batch as a model's arguments, on its device."""
    args, kwargs, _ = split_batch(batch)
    return move((args, kwargs), device_of(model))


def on_shapes(model: Model, inputs: Inputs, run: Callable[[Model, Inputs], Result]) -> Result:
    """Run a model on shapes only if its code allows it, otherwise for real.

    Args:
        model: A host or an ensemble.
        inputs: Its inputs; only their shapes matter.
        run: Gets the model, or a copy without storage in eval mode, and the inputs that go with it.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    try:
        return run(in_eval(copy.deepcopy(model, memo)), move(inputs, "meta"))
    except Exception:  # code that reads values cannot run on shapes: run it
        pass
    try:
        return run(model, inputs)
    except Exception as error:
        name = type(getattr(model, "host", model)).__name__
        raise DataError(
            f"{name} cannot be run on this batch ({type(error).__name__}: {error}). Pass a batch "
            "in the form that the model takes."
        ) from error


@dataclass(frozen=True)
class Measured:
    """Multiply-adds of one run, in total and by block, and the shape of the first states."""

    total: int
    blocks: tuple[int, ...]
    shape: tuple[int, ...]


def measure(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> Measured:
    """Count a run of a host or an ensemble, in total and by block.

    Args:
        blocks: The modules in the host's list of blocks.
        run: Runs the model.
    """
    shapes: list[torch.Size] = []
    counts = [0] * len(blocks)
    counter = operation_counter()

    def begin(block: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not shapes:
            shapes.append(take_call(args, kwargs).hidden.shape)
        counts[block] -= counter.get_total_flops()

    def end(block: int, *_: Any) -> None:
        counts[block] += counter.get_total_flops()

    with ExitStack() as stack, torch.no_grad(), counter:
        for i, block in enumerate(blocks):
            hook = block.register_forward_pre_hook(partial(begin, i), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(block.register_forward_hook(partial(end, i)).remove)
        run()
    total, by_block = counter.get_total_flops() // 2, tuple(flops // 2 for flops in counts)
    return Measured(total, by_block, tuple(shapes[0]))


@dataclass(frozen=True)
class BlockWeight:
    """Multiply-adds of one block.

    Attributes:
        whole: Multiply-adds with all heads.
        head: Saving per removed head; 0 if heads cannot be removed physically.
        heads, group: Number of heads, and size of the groups that are removed together.
        gated: Multiply-adds with heads gated off, if they cannot be removed: a gate before W_O may
            cost a product of its own (torchvision's windows).
        rows: Tokens of the whole batch.
    """

    whole: int
    head: float
    heads: int
    group: int
    gated: int | None = None
    rows: int = 0

    def with_heads(self, places: Sequence[int]) -> int:
        """Return the multiply-adds with these heads kept."""
        if self.gated is not None and len(places) < self.heads:
            return self.gated
        groups = len({place // self.group for place in places})
        return round(self.whole - self.head * (self.heads - groups * self.group))


def weigh_blocks(blocks: Sequence[Block], calls: Sequence[BlockCall]) -> list[BlockWeight]:
    """Count every block of a host, called as in one of the host's forward passes."""
    known: dict[Any, BlockWeight] = {}
    result = []
    for block, call in zip(blocks, calls, strict=True):
        key = (structure_of(block.module), call.shape)
        if key not in known:
            known[key] = _weigh(block, call)
        result.append(known[key])
    return result


def _weigh(block: Block, call: BlockCall) -> BlockWeight:
    site = block.attention
    heads, group = site.num_heads, max(1, site.num_heads // max(1, site.kv_heads))
    full, rows = multiply_adds(lambda: call.call(block.module)), math.prod(call.hidden.shape[:-1])
    remaining = tuple(range(group, heads))
    if not remaining or why_not_cut(block, remaining, call) is not None:
        with opened([site.module]):  # as it is where gates must reach W_O
            gated = multiply_adds(lambda: call.call(block.module))
        return BlockWeight(full, 0.0, heads, group, gated, rows)
    pruned = Block.of(block.index, copy.deepcopy(block.module), block.family)
    Cut(remaining, remaining).apply_(pruned)
    saved = full - multiply_adds(lambda: call.call(pruned.module))
    return BlockWeight(full, saved / group, heads, group, rows=rows)


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
