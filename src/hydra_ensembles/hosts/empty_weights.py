"""Build a model whose weights have no storage, and give it storage later.

On the meta device nothing has values, and what a constructor computes (rotary frequencies, an index
of positions) would be lost. Weights are made by `torch.empty` and filled later; everything else
that a constructor makes has values. So only what `torch.empty` makes is without storage here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WithoutStorage(TorchFunctionMode):
    """While active in a thread, `torch.empty` allocates nothing unless it is given a device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def has_lost_buffers(model: nn.Module) -> bool:
    """Tell whether a buffer that no state dict can fill is without storage."""
    saved = model.state_dict().keys()
    return any(b.is_meta for name, b in model.named_buffers() if name not in saved)


def replace_tensors_(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers, in place; tied ones stay tied.

    Args:
        model: The model.
        replaced: The new tensors by `id` of the old ones.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) in replaced:
                if id(old) not in parameters:
                    new = replaced[id(old)].detach()
                    parameters[id(old)] = nn.Parameter(new, old.requires_grad)
                module._parameters[name] = parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in replaced:
                module._buffers[name] = replaced[id(buffer)]
