"""The body of a fused model: it stands in the host's list of blocks, alone, and is all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.plan import Plan
from ..hosts.family import Family
from ..hosts.probe import Readout
from .layers import Context, FusedBlock, _select, host_mask


class Body(nn.Module):
    """The trunk (the host's own blocks, pruned) and the branched blocks above it.

    Called by the host like a block; returns the members' streams as a larger batch,
    [streams * batch, tokens, width].
    """

    def __init__(
        self,
        trunk: Sequence[nn.Module],
        branch: Sequence[FusedBlock],
        plan: Plan,
        readout: Readout,
        family: Family,
        causal: bool,
    ) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(trunk)
        self.branch = nn.ModuleList(branch)
        self.plan = plan
        self.readout = readout
        self.family = family
        self.causal = causal
        self.positions: Tensor | None = None
        self.replay: Tensor | None = None
        self.cached: Tensor | None = None  # the trunk's output, known already (see training.branch)
        self.watch: list[Tensor] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run all blocks."""
        if self.replay is not None:
            return self.replay
        x = hidden_states if self.cached is None else self.cached
        for block in self.trunk if self.cached is None else ():
            x = block(x, *args, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
            if self.watch is not None:
                self.watch.append(x)
        if self.branch:
            causal = bool(kwargs.get("is_causal", self.causal))
            context = Context(
                mask=host_mask(args, kwargs, x),
                causal=causal,
                tokens=self.readout.tokens,
                positions=self.positions,
            )
            for block in self.branch:
                x = block(x, context)
                if self.watch is not None:
                    self.watch.append(x)
        inputs = self.plan.layers[-1].streams if self.plan.layers else 1
        if self.plan.ends != tuple(range(inputs)):
            x = _select(x, self.plan.ends, inputs)
        return x

    def full_length(self, stream: Tensor, length: int) -> Tensor:
        """Put readout rows back at their places, for a host that looks for them itself."""
        if self.positions is None or stream.shape[1] == length:
            return stream
        whole = stream.new_zeros(stream.shape[0], length, stream.shape[2])
        whole[torch.arange(len(stream), device=stream.device), self.positions] = stream[:, 0]
        return whole
