"""Host models of the benchmarked shapes, with random weights (speed does not depend on them)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hydra_ensembles import HeadMask

VIT = {
    "vit-s": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    "vit-b": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "deit-tiny": {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    "smoke": {
        **{"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 96},
        **{"num_hidden_layers": 3, "image_size": 32},
    },
}
SHAPES = (*VIT, "minilm")


def host(shape: str, *, tokens: int = 64, seed: int = 0, classes: int | None = None) -> nn.Module:
    """Build a host: ViT-S/16, ViT-B/16 and DeiT-tiny at 224 pixels, MiniLM-L6 (BERT).

    `smoke` is a ViT of three small blocks and 10 classes, for trying a command. Texts have 2
    classes and images 1,000, if not given.
    """
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DeiTConfig,
        DeiTForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if shape == "minilm":
            config = BertConfig(
                vocab_size=30522,
                hidden_size=384,
                num_hidden_layers=6,
                num_attention_heads=12,
                intermediate_size=1536,
                max_position_embeddings=max(512, tokens),
                num_labels=classes or 2,
            )
            return BertForSequenceClassification(config).eval()
        sizes = {**VIT[shape], "num_labels": classes or (10 if shape == "smoke" else 1000)}
        if shape == "deit-tiny":
            return DeiTForImageClassification(DeiTConfig(**sizes)).eval()
        return ViTForImageClassification(ViTConfig(**sizes)).eval()


def batch(shape: str, *, size: int = 1, tokens: int = 64) -> dict[str, Any]:
    """Build a batch: images of 224 pixels, or token ids without padding."""
    generator = torch.Generator().manual_seed(0)
    if shape == "minilm":
        ids = torch.randint(1000, 30000, (size, tokens), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    side = VIT[shape].get("image_size", 224)
    return {"pixel_values": torch.randn(size, 3, side, side, generator=generator)}


def masks(
    model: nn.Module, *, members: int = 3, blocks: int, keep: float | int, spread: str = "even"
) -> list[HeadMask]:
    """Let members part in the last blocks, each with its own heads.

    `spread="even"`: members' heads are disjoint while they last, and no two members are equal.
    `"random"`: seeded, as a search would choose, with overlaps.
    """
    full = HeadMask.full(model)
    result = []
    for member in range(members):
        mask = full
        for layer in range(len(full) - blocks, len(full)):
            heads = full.shape[layer]
            count = keep if isinstance(keep, int) else max(1, round(keep * heads))
            if spread == "random":
                seeded = HeadMask.random([heads], keep=count, seed=1000 * member + layer)
                row = seeded[0]
            else:
                row = torch.zeros(heads, dtype=torch.bool)
                order = [h for s in range(members) for h in range(s, heads, members)]
                start = order.index(member % heads)
                stride = 1 + member // heads  # more members than heads: other neighbours
                row[[order[(start + i * stride) % heads] for i in range(count)]] = True
            mask = mask.with_layer(layer, row)
        result.append(mask)
    if blocks and len(set(result)) < members:
        raise ValueError(f"{members} members that differ cannot keep {keep} of the heads each.")
    return result
