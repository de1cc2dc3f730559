"""The MLP of a block: which linear layer gives its output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.modes import twin
from .block import Block
from .sites import linear_weight


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, also in the transposed form of GPT-2."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@torch.no_grad()
def last_linear(block: Block) -> str | None:
    """Return the path of the linear layer whose output is the MLP's output, or None.

    The MLP is run on random states: a norm or a gate after the last linear layer shows up as a
    difference.
    """
    parts = {path: twin(block.module.get_submodule(path)).eval() for path in block.mlp_names}
    outputs: dict[str, Tensor] = {}
    for path, part in parts.items():
        for name, module in part.named_modules():
            if is_linear(module):
                module.register_forward_hook(partial(_note, outputs, f"{path}.{name}".rstrip(".")))
    weight = linear_weight(block.attention.output)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, weight.shape[0], generator=generator).to(weight)
    try:
        for part in parts.values():
            x = part(x)
    except Exception:  # it needs more than states
        return None
    return next((path for path, output in outputs.items() if output.equal(x)), None)


def _note(
    outputs: dict[str, Tensor], path: str, module: nn.Module, inputs: Any, output: Tensor
) -> None:
    outputs[path] = output
