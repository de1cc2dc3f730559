"""Families of timm: Vision Transformers, DeiT, BEiT, EVA and DINOv3."""

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
        after_attention=("attn.proj_drop", "ls1", "gamma_1", "drop_path1"),
        after_mlp=("ls2", "gamma_2", "drop_path2"),
    )
)

register_family(
    Family(
        name="eva",  # EVA-02 with a linear each for queries, keys and values
        query="attn.q_proj",
        key="attn.k_proj",
        value="attn.v_proj",
        output="attn.proj",
        norm1="norm1",
        norm2="norm2",
        mlp=("mlp",),
        after_attention=("attn.proj_drop", "gamma_1", "drop_path1"),
        after_mlp=("gamma_2", "drop_path2"),
    )
)
