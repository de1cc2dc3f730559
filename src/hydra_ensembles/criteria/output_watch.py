"""Observe what heads and neurons pass to the linear layers that read them, while a host runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..hosts import HostModel
from ..hosts.head_weights import linear_weight
from ..hosts.multihead_attention import opened

Seen = Callable[[int, Tensor, Tensor], None]
"""Gets a row's number, values `[tokens, units, width]` and weights `[units, states, width]`."""


class OutputWatch:
    """Passes on what the watched linears read at tokens that are not padding."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.real: Tensor | None = None

    def attention_mask(self, mask: Any) -> None:
        """Take the padding from a batch's `attention_mask` [batch, tokens], if it has one."""
        self.real = mask.bool().flatten() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def hook(self, row: int, units: int, width: int) -> Callable[..., None]:
        """Return a hook before a linear that reads units of some width."""

        def read(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].detach().flatten(0, -2)
            if self.real is not None and len(self.real) == len(values):
                values = values[self.real.to(values.device)]
            weight = linear_weight(module).detach().double().unflatten(1, (units, width))
            self.seen(row, values.double().unflatten(1, (units, width)), weight.transpose(0, 1))

        return read


@contextmanager
def watch_outputs(host: HostModel, seen: Seen, *, neurons: bool) -> Iterator[OutputWatch]:
    """Observe the heads of every layer, and its neurons, while the context is open.

    Args:
        host: The host.
        seen: Called for every layer: heads with its number, neurons with its number after all.
        neurons: Whether to observe neurons too.
    """
    watch = OutputWatch(seen)
    with ExitStack() as stack:
        stack.enter_context(opened([site.module for site in host.sites]))
        for site in host.sites:
            hook = watch.hook(site.layer, site.num_heads, site.head_dim)
            stack.callback(site.output.register_forward_pre_hook(hook).remove)
        for block, mlp in zip(host.blocks, host.mlps if neurons else (), strict=neurons):
            if not isinstance(mlp, str):
                hook = watch.hook(len(host) + block.index, mlp.neurons, 1)
                second = block.module.get_submodule(mlp.second)
                stack.callback(second.register_forward_pre_hook(hook).remove)
        yield watch
