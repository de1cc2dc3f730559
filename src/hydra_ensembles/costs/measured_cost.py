"""Count cost while the host's own code runs: for blocks that our formulas do not describe."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import move, split_batch
from ..data.eval_mode import in_eval
from ..errors import DataError
from ..heads.stream_plan import LayerPlan
from ..hosts import HostModel, device_of
from ..hosts.block_calls import Inputs, capture_calls, take_call
from ..hosts.operation_count import BlockWeight, operation_counter, weigh_blocks


@dataclass(frozen=True)
class Measured:
    """Multiply-adds of one run, in total and by block, and the shape of the first states."""

    total: int
    blocks: tuple[int, ...]
    shape: tuple[int, int, int]


def formula_fits(host: HostModel) -> bool:
    """Return whether a host's blocks are attention over all tokens, norms and MLP, and no more.

    That is so where our own arithmetic is proven equal to them; windows, say, cost less. Without
    storage nothing can be proven, and the parts must do.
    """
    if any(p.is_meta for p in host.model.parameters()):
        return host.family.fusable and all(
            block.norm1 is not None
            and block.norm2 is not None
            and block.mlp_names
            and not block.has_experts
            and not block.unknown_parameters()
            and block.attention.why_not_taken_apart() is None
            for block in host.blocks
        )
    return host.why_not_fused() is None


def inputs_of(model: nn.Module, batch: Any) -> Inputs:
    """Return a batch as a model's arguments, on its device."""
    args, kwargs, _ = split_batch(batch)
    return move(args, device_of(model)), move(kwargs, device_of(model))


def measure(model: Any, root: nn.Module, blocks: str, batch: Any) -> Measured:
    """Count a run of a model: on shapes only if its code allows it, otherwise for real.

    Args:
        model: A host, or an ensemble, which runs all its members.
        root: The host that is called.
        blocks: The path of its blocks.
        batch: A batch in the host's form.
    """
    args, kwargs = inputs_of(root, batch)
    failure: Exception | None = None
    for where in ("meta", None):
        try:
            twin = model if where is None else _without_storage(model)
            inner = twin.host if hasattr(twin, "host") else twin
            inputs = (args, kwargs) if where is None else move((args, kwargs), where)
            return _measure(twin, inner, blocks, inputs)
        except Exception as error:  # code that reads values cannot run on shapes: run it
            failure = error
    raise DataError(
        f"{type(root).__name__} cannot be run on this batch ({type(failure).__name__}: {failure}). "
        "Pass a batch in the form that the model takes."
    ) from failure


def _measure(model: Any, root: nn.Module, path: str, inputs: Inputs) -> Measured:
    shapes: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(take_call(args, kwargs).hidden.shape))

    places = list(root.get_submodule(path).children())
    counter, blocks = operation_counter(), [0] * len(places)

    def begin(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            blocks[place] -= counter.get_total_flops()

        return hook

    def end(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            blocks[place] += counter.get_total_flops()

        return hook

    with ExitStack() as stack, torch.no_grad(), counter:
        hooks = [places[0].register_forward_pre_hook(note, with_kwargs=True)]
        hooks += [block.register_forward_pre_hook(begin(i)) for i, block in enumerate(places)]
        hooks += [block.register_forward_hook(end(i)) for i, block in enumerate(places)]
        for handle in hooks:
            stack.callback(handle.remove)
        if hasattr(model, "fused_logits"):
            model.fused_logits(*inputs)
        else:
            model(*inputs[0], **inputs[1])
    batch, *grid, width = shapes[0]  # states are [batch, tokens, width] or [batch, y, x, width]
    counted = tuple(flops // 2 for flops in blocks)
    return Measured(counter.get_total_flops() // 2, counted, (batch, math.prod(grid), width))


def _without_storage(model: Any) -> Any:
    """Copy a model with tensors that have shapes but no storage, in eval mode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return in_eval(copy.deepcopy(model, memo))


def widest(block: nn.Module) -> int:
    """Return the widest layer of a block."""
    return max((max(p.shape[-2:]) for p in block.parameters() if p.dim() >= 2), default=0)


@dataclass(frozen=True)
class HostedGeometry:
    """Cost of one of the host's own blocks, by the heads that it keeps."""

    weight: BlockWeight

    def plain(self, outside: Any, kept: Sequence[int] | None = None) -> int:
        """Multiply-adds of a block of one stream."""
        weight = self.weight
        return weight.whole if kept is None else weight.with_heads(kept)

    def fused(self, plan: LayerPlan, outside: Any, readout: Any) -> int:
        """Multiply-adds of all streams."""
        return sum(self.weight.with_heads(heads) for heads in plan.heads)


def hosted_geometry(host: HostModel, batch: Any) -> tuple[list[HostedGeometry], Tensor | None]:
    """Count the blocks of a host on a batch; also return the states after the last one."""
    calls = capture_calls(host, inputs_of(host.model, batch))
    return [HostedGeometry(weight) for weight in weigh_blocks(host, calls)], calls[-1].output
