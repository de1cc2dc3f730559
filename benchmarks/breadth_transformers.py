"""Tiny models of every class of transformers for our tasks, and inputs that they take."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

LABELS, VOCABULARY, TOKENS, LAYERS = 5, 99, 9, 3
TASKS = {
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "span": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""What a class is made for, and the table of transformers that lists such classes."""
VARIANTS = {
    "multi-label": {"problem_type": "multi_label_classification"},
    "regression": {"problem_type": "regression", "num_labels": 1},
}
"""Other tasks of classes for sequences, by what their configs say."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "mask_token_id": 3,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "max_position_embeddings": 64,
    "n_positions": 64,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embed_dim"), 32),
    **dict.fromkeys(("pooler_hidden_size", "pooler_output_size", "prediction_head_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "cross_attention_hidden_size"), 32),
    **dict.fromkeys(("embedding_size", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_inner", "d_ff", "dff", "ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size"), 8),
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "local_attention": 8,
    "window_size": 4,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 5,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 24,
    "tdnn_dim": (16, 16),
    "num_codevectors_per_group": 4,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "output_hidden_size": 32,
    "num_frames": 4,
    "max_2d_position_embeddings": 32,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "mamba_d_state": 4,
}
"""A small value for every name of a config that sets a size; names that a config lacks are left."""

SPECIAL: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "canine": {"num_hash_buckets": 16, "local_transformer_stride": 8, "type_vocab_size": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "sew-d": {"position_buckets": 4},
    "doge": {"num_experts": 4, "keep_window_size": 4},
    "exaone4": {"layer_types": ["full_attention"] * LAYERS},
    "funnel": {"block_sizes": [2, 2], "block_repeats": [1, 1], "num_decoder_layers": 2},
    "mpnet": {"relative_attention_num_buckets": 32},
    "esmc": {"num_key_value_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "qwen3_5": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "axk1": {"head_dim": 4, "num_key_value_heads": 4},
    "axk2": {"head_dim": 4, "num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 8},
    "mistral4": {"num_key_value_heads": 4},
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 4},
    "minicpm3": {"head_dim": 4, "num_key_value_heads": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"rotary_dim": 4},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "jetmoe": {"kv_channels": 8},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 6, "shape_size": 4},
    "layoutlmv2": {"coordinate_size": 6, "shape_size": 4},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48},
    "markuplm": {"max_depth": 4, "max_xpath_tag_unit_embeddings": 20, "tag_pad_id": 16},
    "minimax": {"layer_types": ["full_attention"] * LAYERS},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 16},
    "mpt": {"max_seq_len": 64},
    "mvp": {"prompt_length": 4, "prompt_mid_dim": 16},
    "nystromformer": {"segment_means_seq_len": 9, "num_landmarks": 9},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": LAYERS,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    "reformer": {
        "attn_layers": ("local", "local"),
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "feed_forward_size": 48,
        "local_attn_chunk_length": TOKENS,
        "hash_seed": 0,
        "is_decoder": False,
    },
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "squeezebert": {"embedding_size": 32},
    "tapas": {"type_vocab_sizes": (3, 8, 8, 2, 8, 8, 10)},
    "xmod": {"default_language": "en_XX"},
    "beit": {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    "data2vec-vision": {"use_relative_position_bias": True},
    "cvt": {"embed_dim": (16, 24, 32), "num_heads": (1, 2, 4), "depth": (1, 1, 2)},
    "dinov2": {"mlp_ratio": 2},
    "donut-swin": {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "window_size": 2},
    "swin": {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "window_size": 2},
    "swinv2": {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "window_size": 2},
    "focalnet": {"embed_dim": 16, "depths": (1, 2), "focal_levels": (1, 1)},
    "hiera": {
        "embed_dim": 16,
        "image_size": (32, 32),
        "depths": (1, 2),
        "num_heads": (2, 4),
        "num_query_pool": 1,
        "masked_unit_size": (4, 4),
        "masked_unit_attention": (True, False),
    },
    "levit": {"hidden_sizes": (16, 24, 32), "num_attention_heads": (2, 2, 4), "depths": (1, 1, 1)},
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "mobilevit": {"hidden_sizes": (16, 24, 32), "image_size": 64},
    "pvt": {"image_size": 64},
    "pvt_v2": {"image_size": 64},
    "segformer": {"image_size": 64},
    "siglip2": {"num_patches": 16},
    "audio-spectrogram-transformer": {"max_length": 40},
    "whisper": {"max_source_positions": 20, "max_target_positions": 20},
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
    "wav2vec2-conformer": {"conv_depthwise_kernel_size": 3},
    "wavlm": {"num_buckets": 8, "max_bucket_distance": 16},
    "timesformer": {"num_frames": 4},
    "videomae": {"num_frames": 4},
    "vivit": {"tubelet_size": (2, 8, 8)},
    "vjepa2": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 1,
        "num_pooler_layers": 1,
    },
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_projection": 8},
}
"""What single configs need on top of `SMALL`."""


def cases() -> dict[str, tuple[str, str, str]]:
    """Return `name -> (task, model type, class)` of every class for our tasks.

    The name of a class that is made for another task by its config ends in that task.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str, str]] = {}
    for task, table in TASKS.items():
        # of the encoders and decoders, those that a class above is made from
        fitted = {model_type for _, model_type, _ in found.values()} if task == "base" else None
        for model_type, names in getattr(modeling_auto, table).items():
            if fitted is not None and model_type not in fitted:
                continue
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(f"transformers/{name}", (task, model_type, name))
                for variant in VARIANTS if task == "sequence" else ():
                    found.setdefault(f"transformers/{name}, {variant}", (task, model_type, name))
    return found


def config(model_type: str, **more: Any) -> Any:
    """Make a tiny config of a model type."""
    from transformers import CONFIG_MAPPING

    return shrink(CONFIG_MAPPING[model_type], {**SPECIAL.get(model_type, {}), **more})


def shrink(kind: Any, special: dict[str, Any]) -> Any:
    """Make a config of a class with the sizes of `SMALL`, in its inner configs too."""
    from transformers import PreTrainedConfig

    default = kind()
    values: dict[str, Any] = {}
    for name, value in default.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = shrink(type(value), special).to_dict()
        elif name in SMALL and (name.startswith("conv_") or not isinstance(value, (list, tuple))):
            values[name] = SMALL[name]
    known = set(default.__dict__) | set(inspect.signature(kind.__init__).parameters)
    values.update({name: value for name, value in special.items() if name in known})
    values = {name: value for name, value in values.items() if name in known}
    made = kind(**values, num_labels=LABELS)
    if "t5" in made.model_type and not hasattr(made, "decoder_start_token_id"):
        made.decoder_start_token_id = 0
    return made


def build(task: str, model_type: str, name: str, variant: str = "") -> nn.Module:
    """Build one tiny model, of the task that `VARIANTS` calls `variant`."""
    import transformers

    tiny = config(model_type)
    cls = getattr(transformers, name)
    if cls.config_class is not type(tiny) and cls.config_class is not None:
        tiny = shrink(cls.config_class, SPECIAL.get(model_type, {}))
        tiny.num_labels = LABELS
    if task == "span":
        tiny.num_labels = 2
    for key, value in VARIANTS.get(variant, {}).items():
        setattr(tiny, key, value)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(tiny).parameters())
    if size > 30_000_000:
        raise ValueError(f"{size / 1e6:.0f} M parameters: the config was not made small")
    return cls(tiny)


def inputs(model: Any, task: str, padding: str, seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of three samples that a model takes.

    Args:
        model: The model.
        task: A key of `TASKS`.
        padding: `"none"`, `"right"` or `"left"`, of texts; others ignore it.
        seed: Seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    main = model.main_input_name
    if main == "input_ids" and task == "choice":
        both = [_text(model, task, padding, generator) for _ in range(2)]
        return {key: torch.stack([one[key] for one in both], 1) for key in both[0]}
    if main == "input_ids":
        return _text(model, task, padding, generator)
    if task == "audio" or main in ("input_features", "input_values"):
        return _audio(model, main, generator)
    size = _image_size(model)
    channels = 3
    if task == "video":
        frames = getattr(model.config, "num_frames", getattr(model.config, "frames_per_clip", 4))
        return {main: torch.randn(3, frames, channels, *size, generator=generator)}
    if type(model).__name__.startswith("Siglip2"):
        patch = _vision(model.config).patch_size
        return {
            "pixel_values": torch.randn(3, 16, channels * patch**2, generator=generator),
            "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * 3),
        }
    if main == "inputs" and task == "sequence":  # Perceiver
        text = _text(model, task, padding, generator)
        return {main: text["input_ids"], "attention_mask": text["attention_mask"]}
    return {main: torch.randn(3, channels, *size, generator=generator)}


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _image_size(model: Any) -> tuple[int, int]:
    config = _vision(model.config)
    size = getattr(config, "image_size", getattr(config, "crop_size", 32))
    return (size, size) if isinstance(size, int) else tuple(size)


def _text(model: Any, task: str, padding: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(4, VOCABULARY - 1, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    lengths = (TOKENS, TOKENS - 3, TOKENS - 5) if padding != "none" else (TOKENS,) * 3
    for row, length in enumerate(lengths):
        real = slice(0, length) if padding != "left" else slice(TOKENS - length, TOKENS)
        mask[row] = 0
        mask[row, real] = 1
        ids[row, real.stop - 1] = 2  # encoder-decoders read the end-of-text token
    ids = ids.masked_fill(mask == 0, 0)
    batch = {"input_ids": ids, "attention_mask": mask}
    takes = inspect.signature(type(model).forward).parameters
    if "bbox" in takes:
        corner = torch.randint(0, 12, (3, TOKENS, 2), generator=generator)
        box = torch.cat([corner, corner + 6], -1)
        batch["bbox"] = box / 32.0 if type(model).__name__.startswith("Bros") else box
    if type(model).__name__.startswith("LayoutLMv2"):
        batch["image"] = torch.rand(3, 3, 32, 32, generator=generator)
    if type(model).__name__.startswith("LayoutLMv3") and task == "sequence":
        batch["pixel_values"] = torch.rand(3, 3, 32, 32, generator=generator)
    return batch


def _audio(model: Any, main: str, generator: torch.Generator) -> dict[str, Tensor]:
    config = model.config
    if main == "input_values" and hasattr(config, "max_length") and hasattr(config, "time_stride"):
        return {main: torch.randn(3, config.max_length, config.num_mel_bins, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(3, 400, generator=generator)}
    if hasattr(config, "max_source_positions") and type(model).__name__.startswith("Whisper"):
        length = 2 * config.max_source_positions
        return {main: torch.randn(3, config.num_mel_bins, length, generator=generator)}
    width = getattr(config, "feature_projection_input_dim", 16)
    return {main: torch.randn(3, 24, width, generator=generator)}
