"""What a block computes, written once, for one stream: the yardstick of probe and fused blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import add_bias
from .block import Block
from .rotary import Rotary


def run(modules: list[nn.Module], x: Tensor) -> Tensor:
    """Apply modules one after another."""
    for module in modules:
        x = module(x)
    return x


def attend(
    block: Block,
    x: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    rotary: Rotary | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the attention of a block, W_O and its bias included; x [batch, tokens, width]."""
    site = block.attention
    weights = site.weights()

    def project(weight: Tensor, bias: Tensor | None, norm: nn.Module | None) -> Tensor:
        flat = None if bias is None else bias.flatten()
        y = F.linear(x, weight.flatten(0, 1), flat).unflatten(-1, (-1, site.head_dim))
        return y.transpose(1, 2) if norm is None else norm(y.transpose(1, 2))

    query_norm, key_norm = site.head_norms
    q = project(weights.query, weights.query_bias, query_norm)
    k = project(weights.key, weights.key_bias, key_norm)
    v = project(weights.value, weights.value_bias, None)
    if bias is not None:
        mask = add_bias(mask, bias, causal=causal)
    if rotary is not None:
        q, k = rotary.turn(q), rotary.turn(k)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=site.scale
    )
    return F.linear(
        y.transpose(1, 2).flatten(2), weights.output.transpose(0, 1).flatten(1), site.output_bias
    )


def forward(
    block: Block,
    x: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    rotary: Rotary | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a whole block from its parts."""
    assert block.norm1 is not None and block.norm2 is not None
    family = block.family
    get = block.module.get_submodule
    after_attention = [get(path) for path in block.names(family.after_attention)]
    after_mlp = [get(path) for path in block.names(family.after_mlp)]
    mlp = [get(path) for path in block.mlp_names]
    if family.norm == "pre":
        x = x + run(after_attention, attend(block, block.norm1(x), mask, causal, rotary, bias))
        return x + run([*mlp, *after_mlp], block.norm2(x))
    x = block.norm1(x + run(after_attention, attend(block, x, mask, causal, rotary, bias)))
    return block.norm2(x + run([*mlp, *after_mlp], x))
