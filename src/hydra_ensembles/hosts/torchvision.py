"""Families of torchvision, whose attention is torch's own `nn.MultiheadAttention`."""

from __future__ import annotations

from .family import Family, register_family

register_family(
    Family(
        name="torchvision",
        packed="self_attention",
        output="self_attention.out_proj",
        norm1="ln_1",
        norm2="ln_2",
        mlp=("mlp",),
        after_attention=("dropout",),
        returns_tuple=True,
    )
)
