"""Attention by heads, the one function that the probes, the search and the fused blocks share.

It joins masks and a bias per head, and rotates queries and keys by their positions. Hosts differ in
how they pass the angles and in which entries they rotate together. The form is not guessed:
`arithmetic` tries all of them and takes the one that computes the host's block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    rotary: Rotary | None = None,
    rows: Callable[[Tensor], Tensor] | None = None,
    norms: Sequence[nn.Module | None] = (None, None),
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend by heads: [batch, queries, heads, width] from projections of the same layout.

    Args:
        q, k, v: Queries, keys and values [batch, tokens, heads, width].
        scale: Factor of the products of queries and keys.
        mask: Added to the scores, or boolean (True: attend); it already has the queries' rows.
        causal: Causal attention, if there is no mask.
        bias: Added to the scores of each head [batch or 1, heads, queries, keys].
        rotary: Angles by which queries and keys are rotated.
        rows: Selects the tokens of the queries, if they are not all tokens.
        norms: Norms of queries and keys within a head.
        softcap: Soft bound c of the scores, c tanh(s / c), as in Gemma 2.
        dropout: Dropout of the attention weights.
    """
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    q, k = (x if norm is None else norm(x) for x, norm in zip((q, k), norms, strict=True))
    if rotary is not None:
        q, k = rotary.turn(q, rows), rotary.turn(k)
    if bias is not None:
        mask = add_bias(mask, bias, causal=causal)
    causal = causal and mask is None
    if softcap is None:
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout
        )
        return attended.transpose(1, 2)
    scores = softcap * torch.tanh(q @ k.transpose(-2, -1) * (scale / softcap))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = add_bias(mask, scores, causal=False)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (F.dropout(weights, dropout) @ v).transpose(1, 2)


@dataclass(frozen=True)
class AttentionArguments:
    """What attention needs of a block's arguments.

    Attributes:
        mask: Added to (or, boolean, kept in) the scores [batch or 1, 1, queries or 1, keys].
        causal: Whether the host asks for causal attention without a mask; None if it does not say.
        rotary: Angles by which queries and keys are rotated.
        bias: Added to the scores of each head [batch or 1, heads, queries, keys].
    """

    mask: Tensor | None = None
    causal: bool | None = None
    rotary: Rotary | None = None
    bias: Tensor | None = None


def add_bias(mask: Tensor | None, bias: Tensor, *, causal: bool) -> Tensor:
    """Join a mask and scores or a bias of each head, to which it is added."""
    if mask is None and causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return bias + mask


def rows_of_mask(
    mask: Tensor | None,
    *,
    causal: bool,
    keys: int,
    queries: int,
    positions: Tensor | None,
    device: torch.device | None,
) -> Tensor | None:
    """Cut a mask to the query rows that are read: the first rows, or one position per sample.

    Args:
        mask: [batch or 1, 1, queries or 1, keys], or None.
        causal: Causal attention, where there is no mask.
        keys: Number of tokens.
        queries: How many of the first rows are read, where positions is None.
        positions: The row that each sample reads [batch], or None.
        device: Where a mask is made, if one must be.
    """
    if mask is None:
        if not causal:
            return None
        place = torch.arange(keys, device=device)
        rows = place[None, :queries] if positions is None else positions[:, None]
        return (place <= rows[:, :, None])[:, None]
    if mask.shape[2] == 1:
        return mask
    if positions is None:
        return mask[:, :, :queries]
    batch = positions.shape[0]
    every = torch.arange(batch, device=mask.device)
    return mask.expand(batch, -1, -1, -1)[every, :, positions][:, :, None]


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


# Relative position tables: each head adds a learnt number to the score of a pair of tokens.
#
# An index [tokens, tokens] selects the entry of the table [entries, heads], as in BEiT and Swin.
# Each head owns one column, which is removed with the head.

_NAME = "relative_position_bias_table"


@dataclass(frozen=True)
class Grid:
    """The image size that an index is made for.

    Attributes:
        tokens: Number of tokens.
        resolution: Height and width, if they are passed to the blocks, else None.
    """

    tokens: int
    resolution: tuple[int, int] | None


class PositionTable:
    """The table of one block.

    Args:
        owner: The module that holds it.
        block: The block that holds the module.
    """

    def __init__(self, owner: nn.Module, block: nn.Module) -> None:
        self.owner, self.block = owner, block

    @property
    def weight(self) -> nn.Parameter:
        """The table [entries, heads]."""
        return self.owner._parameters[_NAME]  # type: ignore[return-value]

    @property
    def index(self) -> Tensor | None:
        """The entry for each pair of tokens [tokens, tokens]; None if unknown."""
        index: Any = getattr(self.owner, "relative_position_index", None)
        if index is None and hasattr(self.owner, "generate_relative_position_index"):
            index = self.owner.generate_relative_position_index(self.owner.window_size)  # type: ignore[operator]
        if not isinstance(index, Tensor):
            return None
        side = math.isqrt(index.numel())
        return index.reshape(side, side) if side * side == index.numel() else None

    @property
    def grid(self) -> Grid | None:
        """The image size that the index is made for, if known."""
        index = self.index
        if index is None:
            return None
        window, patch = (
            getattr(self.owner, "window_size", None),
            getattr(self.block, "patch_size", 0),
        )
        known = isinstance(window, tuple) and isinstance(patch, int) and patch > 0
        size = (window[0] * patch, window[1] * patch) if known else None  # type: ignore[index]
        return Grid(len(index), size)

    def put_(self, columns: Tensor) -> None:
        """Replace all columns by those of other heads, in place; without heads, change nothing."""
        if columns.shape[1]:  # an attention without heads does not read it
            learns = self.weight.requires_grad
            value = columns.detach().clone().contiguous()
            setattr(self.owner, _NAME, nn.Parameter(value, requires_grad=learns))

    def cut_(self, heads: Sequence[int]) -> None:
        """Keep the columns of these heads, in place."""
        index = torch.tensor(list(heads), dtype=torch.long, device=self.weight.device)
        self.put_(self.weight.index_select(1, index))


def find_table(block: nn.Module) -> PositionTable | None:
    """Find the table of a block; None if it has none or several."""
    owners = [
        module
        for module in block.modules()
        if getattr(module._parameters.get(_NAME), "ndim", 0) == 2
    ]
    return PositionTable(owners[0], block) if len(owners) == 1 else None


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """Look up each head's bias: [heads, entries] and [batch, queries, keys] to
    [batch, heads, queries, keys].
    """
    return table[:, index].transpose(0, 1)
