"""The linear layers of a block that write to its residual stream, and what they are added to.

A block has two: the output projection of its attention and the last linear layer of its MLP. With
u what enters the layer, r the residual stream and s a layer scale (or 1), the block computes

    sum = r + s * (u W + b),   before a norm that may follow the sum.

Whether it does, and what s is, is tested: a copy of the block runs with other outputs of the layer.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.eval_mode import twin
from ..hosts import Block
from ..hosts.block import last_linear
from ..hosts.block_calls import BlockCall, states_of
from ..hosts.families import first_path
from ..hosts.multihead_attention import open_attention_
from .ridge import Linear

Part = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Sublayer:
    """One of the two linear layers.

    Attributes:
        layer: Number of the block.
        part: Whose last linear layer it is.
        path: Its path in the block.
        total: Path of the norm that the sum enters; "" if the block returns the sum.
        scale: s [width], in float64; None if something other than a factor comes between the layer
            and the sum (a norm, in Gemma).
    """

    layer: int
    part: Part
    path: str
    total: str
    scale: Tensor | None = None

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"the {'attention' if self.part == 'attention' else 'MLP'} of block {self.layer}"

    def linear(self, block: Block) -> nn.Module:
        """Return the layer of a block of this architecture."""
        return block.module.get_submodule(self.path)

    def given(self, block: Block) -> Linear:
        """Return the layer's weights in a block, times the scale."""
        return Linear.of(self.linear(block), 1.0 if self.scale is None else self.scale)

    def put_(self, block: Block, linear: Linear) -> None:
        """Set the layer's weights in a block to a map that includes the scale, in place."""
        linear.put_(self.linear(block), 1.0 if self.scale is None else self.scale)


def sublayers(block: Block, call: BlockCall) -> list[Sublayer]:
    """Find the linear layers of a block that write to the residual stream.

    An MLP that does not end with a linear layer (a mixture of experts) is left out.

    Args:
        block: The block.
        call: A call of it by its host.
    """
    pre = block.family.norm == "pre"
    norm1, norm2 = (first_path(block.module, p) for p in (block.family.norm1, block.family.norm2))
    modules = {module: name for name, module in block.module.named_modules()}
    found: list[tuple[Part, str | None, str | None]] = [
        ("attention", modules.get(block.attention.output), norm2 if pre else norm1),
        ("mlp", last_linear(block) if block.mlp_names else None, "" if pre else norm2),
    ]
    result = []
    for part, path, total in found:
        if path is not None:
            sublayer = Sublayer(block.index, part, path, total or "")
            scale = None if total is None else _residual_scale(block, sublayer, call)
            result.append(Sublayer(block.index, part, path, total or "", scale))
    return result


@torch.no_grad()
def _residual_scale(block: Block, sublayer: Sublayer, call: BlockCall) -> Tensor | None:
    """Return s if the sum is r + s * output for any output, else None."""

    def in_float64(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floats else value

    copied = Block.of(block.index, copy.deepcopy(block.module).double(), block.family)
    args, kwargs = pytree.tree_map(in_float64, call.given)
    call = BlockCall(call.hidden.double(), call.keyword, args, kwargs)
    watch = WatchedBlock(copied, sublayer)
    try:
        shape = watch(call).output.shape
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(shape, generator=generator, dtype=torch.float64).to(call.hidden)
        base, ones, noise = (
            watch(call, output=output).total
            for output in (torch.zeros_like(random), torch.ones_like(random), random)
        )
    except Exception:  # it does not run in float64, or skips the layer
        return None
    if base.shape != random.shape:
        return None
    scale = (ones - base)[0, 0]
    linear = torch.allclose(noise - base, random * scale, rtol=1e-6, atol=1e-9)
    return scale.cpu() if linear and bool(scale.all()) else None


@dataclass(frozen=True)
class SeenStates:
    """What a block computed around one linear layer, each [batch, tokens, ...].

    Attributes:
        features, output: What entered and what left the layer.
        total: The sum of the residual stream to which it writes.
        states: What the block returned; None if it was stopped before.
    """

    features: Tensor
    output: Tensor
    total: Tensor
    states: Tensor | None = None


class _EnoughError(Exception):
    """Raised in a hook to stop a block once the sum is known."""


class WatchedBlock:
    """A twin of a block that runs on its own and returns what happens around a linear layer."""

    def __init__(self, block: Block, sublayer: Sublayer) -> None:
        self.module = twin(block.module).eval()  # its own hooks, the same tensors
        open_attention_(Block.of(block.index, self.module, block.family).attention.module)
        self._seen: dict[str, Tensor] = {}
        self._forced: Tensor | None = None
        self._stops = sublayer.part == "attention"
        self.module.get_submodule(sublayer.path).register_forward_hook(self._note_linear)
        if sublayer.total:
            norm = self.module.get_submodule(sublayer.total)
            norm.register_forward_pre_hook(self._note_total, with_kwargs=True)

    def _note_linear(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        output = output if self._forced is None else self._forced
        self._seen |= {"features": inputs[0], "output": output}
        return output

    def _note_total(self, module: nn.Module, inputs: Any, kwargs: Any) -> None:
        if "output" in self._seen:
            self._seen["total"] = inputs[0] if inputs else next(iter(kwargs.values()))
            if self._stops:
                raise _EnoughError

    @torch.no_grad()
    def __call__(
        self, call: BlockCall, hidden: Tensor | None = None, *, output: Tensor | None = None
    ) -> SeenStates:
        """Run the block on states as its host called it.

        Args:
            call: The host's call.
            hidden: Other states than the call's.
            output: Replaces the output of the linear layer.
        """
        self._seen, self._forced = {}, output
        states = None
        with suppress(_EnoughError):
            states = states_of(call.call(self.module, hidden))[0]
        total = self._seen.get("total", states)
        assert total is not None
        return SeenStates(self._seen["features"], self._seen["output"], total, states)
