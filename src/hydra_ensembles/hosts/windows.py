"""Windows: blocks that look at near tokens only, where the host says so by a mask of their own.

A window that is longer than our examples shows in no mask, so settings are compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .block import Block
from .calling import BlockCall
from .multihead import opened
from .probe import largest_difference, random_states, randomized

_REACH = ("sliding", "window", "attention_type", "layer_type", "chunk", "is_local")
"""Parts of names of settings that say which tokens a block looks at."""

_UNKNOWN = "its blocks look at tokens in different ways (windows in some of them)"


def reach(module: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """Return the settings, and masks of its own, that say which tokens a block looks at."""
    found: list[tuple[str, str, Any]] = []
    for path, inner in module.named_modules():
        found += [
            (path, name, value)
            for name, value in vars(inner).items()
            if any(word in name for word in _REACH)
            and isinstance(value, (bool, int, float, str, type(None)))
        ]
        found += [
            (path, name, int(buffer.sum()))
            for name, buffer in inner.named_buffers(recurse=False)
            if buffer.dtype == torch.bool
        ]
    return tuple(sorted(found, key=str))


def differ(blocks: Sequence[Block]) -> bool:
    """Tell whether the settings of some blocks differ."""
    return len({reach(block.module) for block in blocks}) > 1


def why_not_by_masks(
    blocks: Sequence[Block], calls: Sequence[BlockCall] | None, kinds: Sequence[str] | None
) -> str | None:
    """Say why masks may not be all by which blocks look at tokens differently, or None.

    They are where the host's config names a kind for each layer, by which it chooses the mask, and
    a block computes the same, called with the same mask, when it has the settings of another kind.

    Args:
        blocks: The blocks of a host.
        calls: How the host called them in one forward pass.
        kinds: What the config calls the kinds of layers, where it does.
    """
    if calls is None or kinds is None or len(kinds) != len(blocks):
        return _UNKNOWN
    by_kind: dict[str, set[Any]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        by_kind.setdefault(kind, set()).add(reach(block.module))
    if any(len(found) > 1 for found in by_kind.values()):
        return _UNKNOWN
    firsts = {kind: blocks[list(kinds).index(kind)] for kind in by_kind}
    for block in firsts.values():
        for other in firsts.values():
            if other is not block and _looks(block, other, calls[block.index]):
                return _UNKNOWN
    return None


def _looks(block: Block, other: Block, call: BlockCall) -> bool:
    """Tell whether a block itself looks at the settings in which another one differs."""
    own, theirs = randomized(block.module), randomized(block.module)
    settings = {(path, name): value for path, name, value in reach(other.module)}
    for path, inner in theirs.named_modules():
        for name in vars(inner).keys() & {n for p, n in settings if p == path}:
            setattr(inner, name, settings[path, name])
    call = random_states(call)
    twins = [Block.of(block.index, module, block.family) for module in (own, theirs)]
    try:
        with torch.no_grad(), opened([twin.attention.module for twin in twins]):
            difference = largest_difference(call.run(theirs), call.run(own))
    except Exception:  # its code does not take the other settings
        return True
    return not difference <= 1e-6
