"""Rotary positions: queries and keys are rotated by angles that the host passes to its blocks.

Hosts differ in how they pass the angles and in which entries they rotate together. The form is not
guessed: `probe` tries them all and takes the one that computes the host's block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ARGUMENTS = ("position_embeddings", "rope", "rotary_pos_emb")
"""Hosts' names for the angles."""

FORMS = ("halves", "pairs", "pairs of halves")
"""Entry i is rotated with i + width / 2 (Llama); with its neighbour (timm); with its neighbour, by
the first half of the angles (GLM)."""

UNUSED = "unused"
"""The form of a block that gets angles and does not use them (SmolLM3 has some)."""


@dataclass(frozen=True)
class Rotary:
    """Angles of all tokens.

    Attributes:
        cos, sin: [batch or 1, tokens, width]; wider heads are rotated in part.
        pairs: Whether neighbours are rotated together.
    """

    cos: Tensor
    sin: Tensor
    pairs: bool

    def turn(self, x: Tensor, rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Rotate queries or keys [batch, heads, tokens, head width].

        Args:
            x: The queries or keys; streams may be folded into the batch.
            rows: Selects the tokens of the queries, if they are not all tokens.
        """
        cos, sin = (_folded(part, x.shape[0]).to(x.dtype) for part in (self.cos, self.sin))
        if rows is not None:
            cos, sin = (rows(part.expand(x.shape[0], -1, -1)) for part in (cos, sin))
        cos, sin = cos[:, None], sin[:, None]
        width = cos.shape[-1]
        part = x[..., :width]
        if self.pairs:
            other = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        else:
            first, second = part.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        turned = part * cos + other * sin
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def read_rotary(value: Any, form: str, tokens: int) -> Rotary | None:
    """Read the angles that a host passes to a block; None if their shape is unknown.

    A class token and registers before the patches are not rotated.

    Args:
        value: `(cos, sin)`, or one tensor `[sin | cos]` (timm), `[(batch,) tokens, width]` each.
        form: One of `FORMS`.
        tokens: Number of tokens of the states.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        cos, sin = value
    elif isinstance(value, Tensor) and value.dim() in (2, 3) and value.shape[-1] % 2 == 0:
        sin, cos = value.chunk(2, -1)
    else:
        return None
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape):
        return None
    if not cos.is_floating_point() or cos.dim() not in (2, 3):
        return None
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    missing = tokens - cos.shape[1]
    if missing < 0:
        return None
    if missing:
        still = cos.new_ones(cos.shape[0], missing, cos.shape[2])
        cos, sin = torch.cat((still, cos), 1), torch.cat((still - 1, sin), 1)
    if form == "pairs of halves":
        half = cos.shape[-1] // 2
        cos, sin = (part[..., :half].repeat_interleave(2, -1) for part in (cos, sin))
    return Rotary(cos, sin, pairs=form != "halves")


def _folded(part: Tensor, batch: int) -> Tensor:
    """Repeat per-sample angles for streams that are folded into the batch."""
    return part if part.shape[0] in (1, batch) else part.repeat(batch // part.shape[0], 1, 1)
