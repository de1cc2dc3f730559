"""What a block computes, for one stream: the reference for the probes and for fused blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attend as attend_heads
from .attention import bias_of
from .block import Block
from .block_arguments import Understood, add_bias


def run(modules: list[nn.Module], x: Tensor) -> Tensor:
    """Apply modules one after another."""
    for module in modules:
        x = module(x)
    return x


def attend(block: Block, x: Tensor, read: Understood, *, causal: bool) -> Tensor:
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
    mask = read.mask
    if read.bias is not None:
        mask = add_bias(mask, read.bias, causal=causal)
    if weights.positions is not None:
        index = site.table.index if site.table is not None else None
        assert index is not None
        mask = add_bias(mask, bias_of(weights.positions, index[None]), causal=causal)
    if read.rotary is not None:
        q, k = read.rotary.turn(q), read.rotary.turn(k)
    y = attend_heads(q, k, v, mask=mask, causal=causal, scale=site.scale, softcap=site.softcap)
    return F.linear(
        y.transpose(1, 2).flatten(2), weights.output.transpose(0, 1).flatten(1), site.output_bias
    )


def forward(block: Block, x: Tensor, read: Understood, *, causal: bool) -> Tensor:
    """Compute a whole block from its parts and its understood arguments."""
    assert block.norm1 is not None and block.norm2 is not None
    family = block.family
    after_attention = [block.part(path) for path in block.names(family.after_attention)]
    mlp = [block.module.get_submodule(path) for path in block.mlp_names]
    mlp += [block.part(path) for path in block.names(family.after_mlp)]
    if family.norm == "pre":
        x = x + run(after_attention, attend(block, block.norm1(x), read, causal=causal))
        return x + run(mlp, block.norm2(x))
    x = block.norm1(x + run(after_attention, attend(block, x, read, causal=causal)))
    return block.norm2(x + run(mlp, x))
