"""Tiny zero-shot classifiers: dual encoders with class names, language models with a prompt."""

from __future__ import annotations

from typing import Any

import breadth_transformers
import torch
from torch import Tensor

import hydra_ensembles as hydra

NAMES = ["cat", "dog", "bird", "fish", "horse"]
DUAL = {"CLIP": "clip", "SigLIP": "siglip", "SigLIP2": "siglip2"}
PROMPTED = {"GPT-2": "gpt2", "Llama": "llama", "Qwen2": "qwen2", "Gemma2": "gemma2"}


def cases() -> dict[str, str]:
    """Return `name -> model type`."""
    found = {f"zero-shot/{name}": kind for name, kind in DUAL.items()}
    return found | {f"prompted/{name}": kind for name, kind in PROMPTED.items()}


def make(name: str) -> tuple[Any, list[Any], list[None]]:
    """Return a tiny classifier and its batches."""
    kind = cases()[name]
    config = breadth_transformers.config(kind)
    return _prompted(config) if name.startswith("prompted/") else _dual(config)


def _dual(config: Any) -> tuple[Any, list[Any], list[None]]:
    from transformers import AutoModel

    dual = AutoModel.from_config(config).eval()

    def embed(texts: list[str]) -> Tensor:
        width = getattr(dual.config, "projection_dim", dual.config.vision_config.hidden_size)
        return torch.randn(len(texts), width, generator=torch.Generator().manual_seed(3))

    model = hydra.ZeroShotClassifier(dual, NAMES, ["a {}."], encode_text=embed).eval()
    generator = torch.Generator().manual_seed(0)
    vision = config.vision_config
    if config.model_type == "siglip2":
        patches = torch.randn(3, 16, 3 * vision.patch_size**2, generator=generator)
        places = {
            "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * 3),
        }
        return model, [{"pixel_values": patches, **places}], [None]
    size = (vision.image_size, vision.image_size)
    return model, [{"pixel_values": torch.randn(3, 3, *size, generator=generator)}], [None]


def _prompted(config: Any) -> tuple[Any, list[Any], list[None]]:
    from transformers import AutoModelForCausalLM

    language = AutoModelForCausalLM.from_config(config).eval()
    tokens = [[5], [7], [11], [13], [17]]
    model = hydra.PromptClassifier.from_parts(language, NAMES, "A {} is a", tokens).eval()
    batches = [
        breadth_transformers.inputs(language, "sequence", padding, seed)
        for seed, padding in enumerate(("none", "right", "left"))
    ]
    return model, batches, [None] * len(batches)
