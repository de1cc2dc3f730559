"""Families of open_clip, whose attention is torch's own `nn.MultiheadAttention`."""

from __future__ import annotations

from .family import Family, register_family

register_family(
    Family(
        name="open_clip",
        packed="attn",
        output="attn.out_proj",
        norm1="ln_1",
        norm2="ln_2",
        mlp=("mlp",),
        after_attention=("ls_1",),
        after_mlp=("ls_2",),
        returns_tuple=True,
    )
)
