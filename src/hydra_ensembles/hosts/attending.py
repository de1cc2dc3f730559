"""Attention of given queries, keys and values: softmax(q k^T) v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend [batch, heads, tokens, width].

    Args:
        q, k, v: Queries, keys and values.
        mask: Added to the scores, or boolean (True: attend).
        causal: Causal attention, if there is no mask.
        scale: Factor of the products of queries and keys.
        softcap: Soft bound c of the scores, c tanh(s / c), as in Gemma 2.
        dropout: Dropout of the attention weights.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            dropout_p=dropout,
        )
    scores = softcap * torch.tanh(q @ k.transpose(-2, -1) * (scale / softcap))
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if hidden else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v
