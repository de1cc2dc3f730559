"""Read a block's arguments for our own arithmetic: masks, biases, rotary positions.

An argument that we do not know is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import UnsupportedModelError
from .attention import ARGUMENTS, UNUSED, AttentionArguments, Grid, read_rotary
from .block_calls import without_cache
from .reasons import describe_argument

MASKS = ("attention_mask", "attn_mask")
"""Hosts' names for the mask of the attention scores."""

BIASES = ("position_bias", "shared_rel_pos", "shared_rel_pos_bias")
"""Hosts' names for a bias per head that is added to the scores of all blocks."""

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "num_items_in_batch",  # a trainer's, for the loss
        "output_attentions",
        "output_hidden_states",
        "position_ids",  # hosts make angles of them; a block that uses them itself fails the probe
        "return_dict",
        "use_cache",
    }
)
"""Arguments that choose what else is returned or kept, and never change the states."""


class UnknownArgumentError(UnsupportedModelError):
    """Raised when a host passes its blocks an argument that our own arithmetic would drop."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"its blocks take {describe_argument(name)}, which our own arithmetic does not compute"
        )


def read_arguments(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    x: Tensor,
    *,
    rotary: str | None = None,
    heads: int | None = None,
    grid: Grid | None = None,
) -> AttentionArguments:
    """Read a block's arguments; refuse every one that our own arithmetic would have to drop.

    Args:
        names: The block's positional parameters after the states (see `parameter_names`).
        args, kwargs: All arguments but the states.
        x: The states, for their type and length.
        rotary: The form of the host's rotary positions (see `attention.FORMS`), if known.
        heads: The number of heads that a bias must have; None to refuse a bias.
        grid: The image size that a relative position table is made for, if there is one.

    Raises:
        UnsupportedModelError: Names the argument that we do not know.
    """
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names):
        named.update({f"argument {i}": v for i, v in enumerate(args) if i >= len(names)})
    mask, causal, angles, bias = None, None, None, None
    if grid is not None and grid.tokens != x.shape[1]:
        raise UnsupportedModelError(
            f"there are {x.shape[1]} tokens, but the relative position table is for {grid.tokens}; "
            "the host would interpolate it"
        )
    for name, value in named.items():
        value = without_cache(value)
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name == "interpolate_pos_encoding" and value is False:
            continue
        size = None if grid is None else grid.resolution
        if name == "resolution" and size in (None, tuple(value)):
            continue
        if rotary == UNUSED and name in ARGUMENTS:
            continue
        if rotary is not None and name in ARGUMENTS:
            angles = read_rotary(value, rotary, x.shape[1])
            if angles is not None:
                continue
        if heads is not None and is_bias(name, value):
            bias = _bias(value, heads, x)
            if bias is not None:
                continue
        if name in MASKS:
            mask = four_dimensional(value, x)
        elif name == "is_causal" and isinstance(value, bool):
            causal = value
        else:
            raise UnknownArgumentError(name)
    return AttentionArguments(mask, causal, angles, bias)


def is_bias(name: str, value: Any) -> bool:
    """Return whether an argument is a bias per head; some hosts pass it as the mask."""
    by_head = isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] > 1
    return name in BIASES or (name in MASKS and by_head)


def _bias(value: Any, heads: int, x: Tensor) -> Tensor | None:
    """Bring a bias to [batch or 1, heads, queries, keys]; None when it has no such shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    value = value[None] if value.dim() == 3 else value
    tokens = x.shape[1]
    fits = value.dim() == 4 and tuple(value.shape[1:]) == (heads, tokens, tokens)
    return value.to(x.dtype) if fits and len(value) in (1, len(x)) else None


def four_dimensional(mask: Any, x: Tensor) -> Tensor:
    """Bring an attention mask to [batch or 1, 1, queries or 1, keys].

    Hosts pass a 4-D mask (eager, sdpa), a 2-D [batch, keys] padding mask (flash) or a 2-D
    [queries, keys] additive one (open_clip).
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedModelError(
            f"The host passes a {type(mask).__name__} as attention mask to its blocks: expected a "
            'tensor. Load it with attn_implementation="sdpa" or "eager".'
        )
    if mask.dim() == 2:
        mask = mask[None, None] if mask.is_floating_point() else mask[:, None, None].bool()
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedModelError(
            f"An attention mask of shape {tuple(mask.shape)} is not supported: expected "
            "[batch, 1, queries, keys], the same for all heads."
        )
    return mask.to(x.dtype) if mask.is_floating_point() else mask
