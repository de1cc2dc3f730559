"""What the last block of a host computes at its readout: neurons, states, and the host's logits.

With a the state that enters the residual sum and u the activations of the MLP's neurons, the block
gives s = a + scale * (u W + b), before a norm that may follow. `scale` is a layer scale, or 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import main_output
from ..data.eval_mode import twin
from ..errors import UnsupportedModelError
from ..fusion.linear_readout import TappedHost
from ..hosts import Block, HostModel, host_model
from ..hosts.block import last_linear
from ..hosts.block_calls import states_of
from ..hosts.families import Family
from ..hosts.head_weights import linear_weight
from ..hosts.probes import Pooling, Readout, find_pooling
from ..tasks import task_of
from .ridge import Linear


@dataclass(frozen=True)
class Parting:
    """Where the members of a folded model branch.

    Attributes:
        second: Path of the last block's last linear layer.
        readout: Which tokens the classifier reads.
        family: The family of the hosts.
        pooling: How tokens are averaged, where the classifier reads all of them.
    """

    second: str
    readout: Readout
    family: Family
    pooling: Pooling | None = None

    @classmethod
    def of(cls, host: HostModel) -> Parting:
        """Find where members branch.

        Raises:
            UnsupportedModelError: When it is not clear which tokens the host reads, or its last
                block does not end with a linear layer of an MLP.
        """
        readout, block = host.readout, host.blocks[-1]
        pooling = None if readout.has_token else find_pooling(host)
        second = last_linear(block) if block.mlp_names else None
        reason = host.why_not_fusable()
        if reason is None and pooling is None and not readout.has_token:
            reason = (
                f"its classifier reads {readout}, and it is not clear how it averages them "
                f"({readout.why})"
            )
        if reason is None and (second is None or block.norm2 is None):
            reason = "the MLP of its last block does not end with a linear layer"
        if reason is None and layer_scale(block) is None:
            reason = "something other than a scale follows the MLP of its last block"
        if reason is not None:
            raise UnsupportedModelError(
                f"{host.name} cannot be folded: {reason}. Use distill(model, teachers, data), "
                "which trains the members instead."
            )
        assert second is not None
        return cls(second, readout, host.family, pooling)

    def block(self, model: nn.Module) -> Block:
        """Return the last block of a host."""
        return host_model(model, family=self.family).blocks[-1]

    def linear(self, model: nn.Module) -> Linear:
        """Return a host's own last linear layer, its layer scale included."""
        block = self.block(model)
        layer, scale = block.module.get_submodule(self.second), layer_scale(block)
        assert scale is not None
        return Linear.of(layer, scale)


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
    """What a host computes on a batch, in float64 on the CPU.

    Attributes:
        features: u [row, neurons]; one row per token that is read, example by example.
        entering: a [row, width].
        total: s [row, width].
        weights: How much each row counts [row]; None for equal weights.
        readout: The features of linear readouts [batch, feature].
        logits: [batch, class]; of tokens, all of a text in one row.
    """

    features: Tensor
    entering: Tensor
    total: Tensor
    weights: Tensor | None
    readout: Tensor
    logits: Tensor

    @property
    def update(self) -> Tensor:
        """What the MLP adds: scale * (u W + b) [row, width]."""
        return self.total - self.entering


class Reader:
    """Runs a host and returns the states of its last block at the readout.

    Example:
        >>> states = Reader(model, Parting.of(host_model(model)))(batch)
        >>> states.total - states.entering  # what the last MLP adds
    """

    def __init__(self, model: nn.Module, parting: Parting) -> None:
        self._host = TappedHost(
            model, parting.family, parting.readout, parting.second, parting.pooling
        )
        self._pooling = parting.pooling
        self._totals: list[Tensor] = []
        block = self._host.block
        if parting.family.norm == "post":
            assert block.norm2 is not None
            block.norm2.register_forward_pre_hook(self._note_sum)
        else:
            block.module.register_forward_hook(self._note_output)

    def _note_sum(self, module: nn.Module, inputs: Any) -> None:
        self._totals.append(inputs[0])

    def _note_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._totals.append(states_of(output)[0])

    def __call__(self, batch: Any) -> States:
        """Run a batch; labels are left out."""
        self._totals.clear()
        output, collector = self._host(batch)
        logits = main_output(output, task_of(self._host.model).fields)
        neurons, entering = collector.rows()
        weights = None
        if self._pooling is not None:
            counted = collector.real_tokens(neurons).clone()
            counted[:, self._pooling.own : self._pooling.start] = 0
            weights = counted.flatten().double().cpu()
        u, a, s = (
            x.flatten(0, 1).double().cpu()
            for x in (neurons, entering, collector.select(self._totals[-1]))
        )
        return States(
            u, a, s, weights, collector.features().double().cpu(), logits.flatten(1).double().cpu()
        )
