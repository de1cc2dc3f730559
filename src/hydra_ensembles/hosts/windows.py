"""Windows: blocks that attend only to nearby tokens, by their own mask.

A window that is longer than our examples does not show in a mask, so settings are also compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .block import Block
from .block_calls import BlockCall
from .multihead_attention import opened
from .probes import largest_difference, random_states, randomized

_REACH = ("sliding", "window", "attention_type", "layer_type", "chunk", "is_local")
"""Parts of the names of settings that say which tokens a block attends to."""

_UNKNOWN = "its blocks look at tokens in different ways (windows in some of them)"


def reach(module: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """Return the settings and own masks that say which tokens a block attends to."""
    settings: list[tuple[str, str, Any]] = []
    for path, inner in module.named_modules():
        settings += [
            (path, name, value)
            for name, value in vars(inner).items()
            if any(word in name for word in _REACH)
            and isinstance(value, (bool, int, float, str, type(None)))
        ]
        settings += [
            (path, name, int(buffer.sum()))
            for name, buffer in inner.named_buffers(recurse=False)
            if buffer.dtype == torch.bool
        ]
    return tuple(sorted(settings, key=str))


def differ(blocks: Sequence[Block]) -> bool:
    """Return whether the settings of some blocks differ."""
    return len({reach(block.module) for block in blocks}) > 1


def why_not_by_masks(
    blocks: Sequence[Block], calls: Sequence[BlockCall] | None, kinds: Sequence[str] | None
) -> str | None:
    """Say why the masks may not be the only difference in what blocks attend to, or None.

    They are the only difference if the config names a kind per layer, by which the host chooses the
    mask, and a block with another kind's settings computes the same from the same mask.

    Args:
        blocks: The blocks of a host.
        calls: How the host called them in one forward pass.
        kinds: The config's names for the kinds of layers, if any.
    """
    if calls is None or kinds is None or len(kinds) != len(blocks):
        return _UNKNOWN
    by_kind: dict[str, set[Any]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        by_kind.setdefault(kind, set()).add(reach(block.module))
    if any(len(reaches) > 1 for reaches in by_kind.values()):
        return _UNKNOWN
    firsts = {kind: blocks[list(kinds).index(kind)] for kind in by_kind}
    for block in firsts.values():
        for other in firsts.values():
            if other is not block and _looks(block, other, calls[block.index]):
                return _UNKNOWN
    return None


def _looks(block: Block, other: Block, call: BlockCall) -> bool:
    """Return whether a block itself reads the settings in which another block differs."""
    original, changed = randomized(block.module), randomized(block.module)
    settings = {(path, name): value for path, name, value in reach(other.module)}
    for path, inner in changed.named_modules():
        for name in vars(inner).keys() & {n for p, n in settings if p == path}:
            setattr(inner, name, settings[path, name])
    call = random_states(call)
    twins = [Block.of(block.index, module, block.family) for module in (original, changed)]
    try:
        with torch.no_grad(), opened([twin.attention.module for twin in twins]):
            difference = largest_difference(call.run(changed), call.run(original))
    except Exception:  # its code does not accept the other settings
        return True
    return not difference <= 1e-6
