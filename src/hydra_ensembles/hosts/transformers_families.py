"""Families of Hugging Face transformers: names of version 5 and of the versions before it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

from .families import Family, register_family

VIT = Family(
    name="vit",  # ViT, DeiT, DINOv2, BEiT and others
    query=("attention.q_proj", "attention.attention.query"),
    key=("attention.k_proj", "attention.attention.key"),
    value=("attention.v_proj", "attention.attention.value"),
    output=("attention.o_proj", "attention.output.dense"),
    norm1=("layernorm_before", "norm1"),
    norm2=("layernorm_after", "norm2"),
    mlp=(("mlp", "intermediate"), "output.dense"),
    after_attention=(
        "attention.output.dropout",
        "dropout",
        "layer_scale1",
        "lambda_1",
        "drop_path",
    ),
    after_mlp=("output.dropout", "dropout", "layer_scale2", "lambda_2", "drop_path"),
    returns_tuple=True,
)
BERT = Family(
    name="bert",  # BERT, RoBERTa, ELECTRA and others
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    norm="post",
    norm1="attention.output.LayerNorm",
    norm2="output.LayerNorm",
    mlp=("intermediate", "output.dense"),
    after_attention=("attention.output.dropout",),
    after_mlp=("output.dropout",),
    returns_tuple=True,
)
ESM = replace(
    BERT,
    name="esm",  # like BERT, but pre-norm
    norm="pre",
    norm1="attention.LayerNorm",
    norm2="LayerNorm",
    scales_queries=True,
)
MPNET = replace(
    BERT,
    name="mpnet",  # a relative position bias per head, shared by all blocks
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    norm1="attention.LayerNorm",
    after_attention=("attention.dropout",),
)
ALBERT = Family(
    name="albert",  # its layers share weights: see `shared_layers`
    blocks=("albert.encoder.albert_layer_groups", "encoder.albert_layer_groups"),
    query="albert_layers.0.attention.query",
    key="albert_layers.0.attention.key",
    value="albert_layers.0.attention.value",
    output="albert_layers.0.attention.dense",
    norm="post",
    norm1="albert_layers.0.attention.LayerNorm",
    norm2="albert_layers.0.full_layer_layer_norm",
    mlp=("albert_layers.0.ffn", "albert_layers.0.activation", "albert_layers.0.ffn_output"),
    after_attention=("albert_layers.0.attention.output_dropout",),
    returns_tuple=True,
)
DISTILBERT = Family(
    name="distilbert",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    norm="post",
    norm1="sa_layer_norm",
    norm2="output_layer_norm",
    mlp="ffn",
    returns_tuple=True,
)
CLIP = Family(
    name="clip",  # CLIP's two towers, SigLIP
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    norm1="layer_norm1",
    norm2="layer_norm2",
    returns_tuple=True,
)
OPT = replace(
    CLIP,
    name="opt",  # OPT, Whisper's encoder
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    mlp=("fc1", "activation_fn", "fc2"),
)
GPT2 = Family(
    name="gpt2",
    packed="attn.c_attn",
    output="attn.c_proj",
    norm1="ln_1",
    norm2="ln_2",
    after_attention=("attn.resid_dropout",),
    returns_tuple=True,
)
LLAMA = replace(
    CLIP,
    name="llama",  # Llama, Mistral, Qwen and others: rotary positions, grouped queries
    output="self_attn.o_proj",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    after_attention=("post_self_attn_layernorm",),  # GLM 4 has these two
    after_mlp=("post_mlp_layernorm",),
)
GEMMA = replace(
    LLAMA,
    name="gemma",  # Gemma 2 and 3: norms before and after attention and MLP
    norm2="pre_feedforward_layernorm",
    after_attention=("post_attention_layernorm",),
    after_mlp=("post_feedforward_layernorm",),
)
NOMIC = replace(
    LLAMA,
    name="nomic",  # nomic, gte, jina v3: rotary positions in a post-norm encoder
    norm="post",
    norm1="post_attention_layernorm",
    norm2="post_mlp_layernorm",
    after_attention=("post_attention_dropout",),
    after_mlp=("post_mlp_dropout",),
)
PHI3 = Family(
    name="phi3",  # one linear for queries, keys and values
    packed="self_attn.qkv_proj",
    output="self_attn.o_proj",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    after_attention=("resid_attn_dropout",),
    after_mlp=("resid_mlp_dropout",),
    returns_tuple=True,
)
MODERNBERT = Family(
    name="modernbert",  # windows in two of three blocks, each kind with its rotary positions
    packed="attn.Wqkv",
    output="attn.Wo",
    norm1="attn_norm",
    norm2="mlp_norm",
    after_attention=("attn.out_drop",),
    returns_tuple=True,
)

for family in (
    *(VIT, BERT, ALBERT, MPNET, DISTILBERT, CLIP, OPT, GPT2),
    *(GEMMA, LLAMA, PHI3, MODERNBERT, ESM, NOMIC),
):
    register_family(family)


def introduce_to_pipelines(model: Any, kind: type) -> None:
    """Register a class with transformers' pipelines as one of their classifiers.

    Otherwise they log that it is not supported, and then work. Does nothing for models of other
    libraries.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        _introduce(kind)


@cache
def _introduce(kind: type) -> None:
    import transformers

    config = type(f"{kind.__name__}Config", (transformers.PretrainedConfig,), {})
    for task in ("Image", "Sequence", "Token"):
        name = f"AutoModelFor{task}Classification"
        getattr(transformers, name)._model_mapping.register(config, kind, exist_ok=True)
