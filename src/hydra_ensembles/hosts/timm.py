"""Families of timm: Vision Transformers and DeiT."""

from __future__ import annotations

from .family import Family, register_family

register_family(
    Family(
        name="timm",
        packed="attn.qkv",
        output="attn.proj",
        norm1="norm1",
        norm2="norm2",
        mlp=("mlp",),
        after_attention=("attn.proj_drop", "ls1", "drop_path1"),
        after_mlp=("ls2", "drop_path2"),
    )
)
