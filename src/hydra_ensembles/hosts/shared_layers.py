"""Layers that share one set of weights (ALBERT), unrolled: one block per call, the same weights.

A shared layer has the same heads in every call, so members could not branch late. Unrolled, every
call is a block with its own mask. The user's model does not change: the unrolled model is a twin
that shares its parameters.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_ENCODER = "AlbertTransformer"


def unrolled(model: nn.Module) -> nn.Module | None:
    """Return a twin with one block per call of a shared layer, or None when no layer is shared."""
    shared = _shared_encoder(model)
    if shared is None:
        return None
    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo)
    encoder: Any = twin.get_submodule(shared)
    groups = encoder.albert_layer_groups
    blocks = []
    for number in groups_of_calls(encoder):
        group = groups[number]
        tensors = {id(t): t for t in (*group.parameters(), *group.buffers())}
        blocks.append(copy.deepcopy(group, tensors))
    encoder.albert_layer_groups = nn.ModuleList(blocks)
    for module in twin.modules():  # a saved folder must describe the unrolled structure
        config: Any = getattr(module, "config", None)
        if hasattr(config, "num_hidden_groups"):
            config.num_hidden_groups = len(blocks)
    return twin


def shared_layers(model: nn.Module) -> list[nn.Module] | None:
    """Return the layer that each call runs, bottom to top; None when no layer is shared."""
    shared = _shared_encoder(model)
    if shared is None:
        return None
    encoder: Any = model.get_submodule(shared)
    return [encoder.albert_layer_groups[number] for number in groups_of_calls(encoder)]


def groups_of_calls(encoder: Any) -> list[int]:
    """Number the group of layers that each call of ALBERT's encoder runs."""
    config = encoder.config
    calls = config.num_hidden_layers
    return [int(call / (calls / config.num_hidden_groups)) for call in range(calls)]


def _shared_encoder(model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        if type(module).__name__ == _ENCODER:
            config: Any = module.config
            shares = config.num_hidden_groups < config.num_hidden_layers
            return path if shares and config.inner_group_num == 1 else None
    return None
