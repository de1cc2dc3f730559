"""Queries and keys of a layer as its softmax sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN = -1e4
"""An additive mask at or below this hides a key: exp(-1e4) is 0 in every precision."""


@dataclass(frozen=True)
class AttentionView:
    """One layer's attention on one batch: softmax(scale * query . key + bias).

    Shapes: `query` [batch, heads, rows, width]; `key` [batch, heads or fewer, keys, width]
    (grouped queries share keys); `hidden` (True = left out) and `bias` (finite) [batch|1,
    heads|1, rows|1, keys] or None; `real_rows` [batch, rows], False where a query is padding, or
    None for none. `causal`: row t sees the keys 0..t. In a view of ready scores `query` holds
    them, [batch, heads, rows, keys], and `key` is None.
    """

    layer: int
    query: Tensor
    key: Tensor | None
    scale: float = 1.0
    hidden: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    real_rows: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of queries of a sample."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys of a sample."""
        return self.query.shape[3] if self.key is None else self.key.shape[2]

    def visible_keys(self) -> Tensor:
        """Count the keys that each row sees: float32 [batch|1, heads|1, rows]."""
        device = self.query.device
        count = torch.full((1, 1, self.rows), float(self.keys), device=device)
        if self.hidden is not None:
            rows = self.hidden
            if self.causal:
                rows = rows | later_keys(slice(0, self.rows), self.keys, device)
            count = (~rows).sum(-1).float().expand(*rows.shape[:2], self.rows)
        elif self.causal:
            count = torch.arange(1, self.rows + 1, device=device).clamp_max(self.keys).float()
            count = count[None, None]
        return count

    def counted_rows(self) -> Tensor:
        """Tell which rows count, bool [batch|1, heads|1, rows]: no padding, two or more keys."""
        counted = self.visible_keys() >= 2
        return counted if self.real_rows is None else counted & self.real_rows[:, None]

    def scores(self, rows: slice) -> Tensor:
        """Compute the scores of some rows, float32 [batch, heads, rows, keys], hidden = -inf."""
        rows = slice(rows.start, min(rows.stop, self.rows))
        if self.key is None:
            scores = self.query[:, :, rows].float().clone()
        else:
            key = repeat_keys(self.key, self.query.shape[1]).float()
            scores = (self.query[:, :, rows].float() * self.scale) @ key.transpose(-1, -2)
        if self.bias is not None:
            scores += _some(self.bias, rows)
        if self.causal:
            scores.masked_fill_(later_keys(rows, self.keys, scores.device), float("-inf"))
        if self.hidden is not None:
            scores.masked_fill_(_some(self.hidden, rows), float("-inf"))
        return scores


def repeat_keys(key: Tensor, heads: int) -> Tensor:
    """Give every query head its keys: [batch, groups, keys, width] to [batch, heads, ...]."""
    return key if key.shape[1] == heads else key.repeat_interleave(heads // key.shape[1], dim=1)


def _some(mask: Tensor, rows: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[:, :, rows]


def later_keys(rows: slice, keys: int, device: torch.device) -> Tensor:
    """Tell which keys come after each of the given rows, bool [rows, keys]."""
    places = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(keys, device=device) > places[:, None]


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask (bool: True = seen; float: added) into hidden keys and a finite bias, 4-D."""
    if mask is None:
        return None, None
    mask = mask.detach()
    mask = mask[(None,) * (4 - mask.dim())]
    if not mask.is_floating_point():
        hidden, bias = ~mask.bool(), None
    else:
        hidden = mask <= HIDDEN
        bias = mask.float().masked_fill(hidden, 0.0)
        bias = bias if bool(bias.any()) else None
    return (hidden if bool(hidden.any()) else None), bias
