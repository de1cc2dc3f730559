"""What our own arithmetic makes of a block's arguments: masks, biases, rotary positions.

An argument that is not understood is a refusal, never dropped.
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
"""What hosts call the mask that is added to (or kept in) the attention's scores."""

BIASES = ("position_bias", "shared_rel_pos", "shared_rel_pos_bias")
"""What hosts call a bias of each head that is added to the scores of all blocks."""

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
    """Raised when a block is handed an argument that our own arithmetic would have to drop."""

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
        args, kwargs: What the host handed over, beside the states.
        x: The states, for their type and length.
        rotary: The form of the host's rotary positions (see `rotary`), where it is known.
        heads: The number of heads that a bias must have; None: a bias is refused.
        grid: The pictures that a table by relative position is made for, where there is one.

    Raises:
        UnsupportedModelError: Naming the argument that is not understood.
    """
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names):
        named.update({f"argument {i}": v for i, v in enumerate(args) if i >= len(names)})
    mask, causal, angles, bias = None, None, None, None
    if grid is not None and grid.tokens != x.shape[1]:
        raise UnsupportedModelError(
            f"there are {x.shape[1]} tokens, and the table of relative positions is for "
            f"{grid.tokens}, which the host would interpolate"
        )
    for name, value in named.items():
        value = without_cache(value)
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in ("resolution", "interpolate_pos_encoding") and _same_size(name, value, grid):
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
    """Tell whether an argument is a bias of each head; some hosts hand it over as the mask."""
    by_head = isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] > 1
    return name in BIASES or (name in MASKS and by_head)


def _same_size(name: str, value: Any, grid: Grid | None) -> bool:
    """Tell whether pictures have the size that the host's positions are made for."""
    if name == "interpolate_pos_encoding":
        return value is False
    return grid is None or grid.resolution is None or tuple(value) == grid.resolution


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
            f"The host hands its blocks a {type(mask).__name__} as attention mask: expected a "
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
