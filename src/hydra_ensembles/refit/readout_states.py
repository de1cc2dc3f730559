"""What the last block of a host computes at the readout token: features and the residual sum.

With a the state that enters the residual sum and u the activations of the MLP's neurons, the block
gives s = a + scale * (u W + b), before a norm that may follow. `scale` is a layer scale, or 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.eval_mode import twin
from ..data.model_runs import call_model
from ..errors import UnsupportedModelError
from ..hosts import Block, HostModel, host_model
from ..hosts.block import last_linear
from ..hosts.block_calls import states_of
from ..hosts.families import Family
from ..hosts.head_weights import linear_weight
from .ridge import Linear


@dataclass(frozen=True)
class Parting:
    """Where the members of a folded model branch.

    Attributes:
        second: Path of the last block's last linear layer.
        tokens: Number of leading tokens that the classifier reads.
        family: The family of the hosts.
    """

    second: str
    tokens: int
    family: Family

    @classmethod
    def of(cls, host: HostModel) -> Parting:
        """Find where members branch.

        Raises:
            UnsupportedModelError: When the host does not read a fixed token, or our arithmetic does
                not cover its last block.
        """
        reason = why_not_parted(host)
        if reason is not None:
            raise UnsupportedModelError(
                f"{host.name} cannot be folded: {reason}. Use distill(model, teachers, data), "
                "which trains the members instead."
            )
        second, tokens = last_linear(host.blocks[-1]), host.readout.tokens
        assert second is not None and tokens is not None
        return cls(second, tokens, host.family)

    def block(self, model: nn.Module) -> Block:
        """Return the last block of a host."""
        return host_model(model, family=self.family).blocks[-1]

    def linear(self, model: nn.Module) -> Linear:
        """Return a host's own last linear layer, its layer scale included."""
        block = self.block(model)
        layer, scale = block.module.get_submodule(self.second), layer_scale(block)
        assert scale is not None
        bias: Any = layer.bias
        weight = linear_weight(layer).detach().double().cpu().T
        return Linear(
            weight * scale, None if bias is None else bias.detach().double().cpu() * scale
        )


def why_not_parted(host: HostModel) -> str | None:
    """Say why the members of a host cannot part at its last linear layer, or None."""
    readout, block = host.readout, host.blocks[-1]
    if readout.tokens is None:
        return f"its classifier reads {readout}, not a fixed token"
    if not readout.folds:
        return "its classifier looks at its inputs again after the blocks"
    reason = host.why_not_fused()
    if reason is None and last_linear(block) is None:
        reason = "the MLP of its last block does not end with a linear layer"
    if reason is None and layer_scale(block) is None:
        reason = "something other than a scale follows the MLP of its last block"
    return reason


@torch.no_grad()
def layer_scale(block: Block) -> Tensor | None:
    """Return the factor of a block's MLP output [width]; None if what follows is not a factor.

    What follows the MLP is run on ones and on random states.
    """
    parts = [twin(block.part(path)).eval() for path in block.names(block.family.after_mlp)]
    weight = linear_weight(block.attention.output)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(1, 2, weight.shape[0], generator=generator).to(weight)
    scale, scaled = torch.ones_like(random), random
    for part in parts:
        scale, scaled = part(scale), part(scaled)
    if not torch.allclose(scaled, random * scale) or not bool(scale.all()):
        return None
    return scale[0, 0].double().cpu()


@dataclass(frozen=True)
class States:
    """Rows of readout tokens: u [row, neurons], scale * (u W + b) and s [row, width]."""

    features: Tensor
    update: Tensor
    total: Tensor


class Reader:
    """Runs a host and returns the states of its last block at the readout tokens."""

    def __init__(self, model: nn.Module, parting: Parting) -> None:
        self.model = twin(model).eval()  # its own hooks and modes, the same tensors
        self._tokens = parting.tokens
        self._seen: dict[str, Tensor] = {}
        block = parting.block(self.model)
        scale = layer_scale(block)
        assert scale is not None and block.norm2 is not None
        self._scale = scale
        second = block.module.get_submodule(parting.second)
        second.register_forward_hook(self._note_second)
        if parting.family.norm == "post":
            block.norm2.register_forward_pre_hook(self._note_sum)
        else:
            block.module.register_forward_hook(self._note_output)

    def _keep(self, name: str, states: Tensor) -> None:
        rows = states[:, : self._tokens].flatten(0, 1)
        self._seen[name] = rows.detach().double().cpu()

    def _note_second(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._keep("features", inputs[0])
        self._keep("update", output)

    def _note_sum(self, module: nn.Module, inputs: Any) -> None:
        self._keep("total", inputs[0])

    def _note_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._keep("total", states_of(output)[0])

    @torch.no_grad()
    def __call__(self, batch: Any) -> States:
        """Run a batch; labels are left out."""
        self._seen.clear()
        call_model(self.model, batch)
        seen = self._seen
        return States(seen["features"], seen["update"] * self._scale, seen["total"])
