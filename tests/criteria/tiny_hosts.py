"""Tiny random hosts of every family, their batches, and entropy by hand from the softmax matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 50
Batch = Any


def seeded(make: Callable[[], nn.Module], *, sharpen: float = 6.0) -> nn.Module:
    """Build a model from a fixed seed; larger weights make attention that is not uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and any(
                    part in name for part in ("attn", "attention", "q_lin", "k_lin", "in_proj")
                ):
                    parameter.mul_(sharpen)
    return model


def texts(
    lengths: tuple[int, ...] = (7, 4, 5, 2, 6, 3), *, side: str = "right", labels: int = 3
) -> dict[str, Tensor]:
    """Return padded token ids, their mask and labels."""
    generator = torch.Generator().manual_seed(1)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        mask[row, :n] = 1
    if side == "left":
        mask = mask.flip(1)
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % labels}


def images(count: int = 6, *, size: int = 16, labels: int = 3) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, size, size, generator=generator), torch.arange(count) % labels


def bert(backend: str = "sdpa") -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
        attn_implementation=backend,
    )
    return seeded(lambda: BertForSequenceClassification(config), sharpen=25.0)


def distilbert(backend: str = "sdpa") -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=24,
        n_layers=2,
        n_heads=3,
        hidden_dim=32,
        max_position_embeddings=32,
        num_labels=3,
        attn_implementation=backend,
    )
    return seeded(lambda: DistilBertForSequenceClassification(config), sharpen=25.0)


def vit(backend: str = "sdpa") -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=3,
        attn_implementation=backend,
    )
    return seeded(lambda: ViTForImageClassification(config), sharpen=25.0)


def clip_text(backend: str = "sdpa") -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        projection_dim=3,
        max_position_embeddings=16,
        attn_implementation=backend,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    return seeded(lambda: CLIPTextModelWithProjection(config))


def gpt2(backend: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=32,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=backend,
    )
    return seeded(lambda: GPT2ForSequenceClassification(config), sharpen=25.0)


def llama_config(backend: str = "sdpa") -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=backend,
    )


def llama(backend: str = "sdpa") -> nn.Module:
    from transformers import LlamaForSequenceClassification

    return seeded(lambda: LlamaForSequenceClassification(llama_config(backend)), sharpen=25.0)


def timm_vit(*, qk_norm: bool = False) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return seeded(
        lambda: VisionTransformer(
            img_size=16,
            patch_size=4,
            embed_dim=24,
            depth=2,
            num_heads=3,
            mlp_ratio=2,
            num_classes=3,
            qk_norm=qk_norm,
        )
    )


def open_clip_visual() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return seeded(
        lambda: VisionTransformer(
            image_size=16, patch_size=4, width=24, layers=2, heads=3, mlp_ratio=2, output_dim=3
        )
    )


class OpenClipText(nn.Module):
    """open_clip's text tower with a batch's ids."""

    def __init__(self) -> None:
        super().__init__()
        from open_clip.transformer import TextTransformer

        self.tower = TextTransformer(
            context_length=7, vocab_size=VOCABULARY, width=24, heads=3, layers=2, output_dim=3
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tower(input_ids)


def open_clip_text() -> nn.Module:
    return seeded(OpenClipText)


def without(batch: dict[str, Tensor], *keys: str) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key not in keys}


HOSTS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "bert": (bert, texts()),
    "distilbert": (distilbert, texts()),
    "vit": (vit, images()),
    "clip_text": (clip_text, texts()),
    "gpt2": (gpt2, texts()),
    "llama": (llama, texts()),
    "timm": (timm_vit, images()),
    "timm_qk_norm": (lambda: timm_vit(qk_norm=True), images()),
    "open_clip_visual": (open_clip_visual, images()),
    "open_clip_text": (open_clip_text, without(texts((7, 7, 7, 7)), "attention_mask")),
}


def take(batch: Batch, rows: slice) -> Batch:
    if isinstance(batch, tuple):
        return tuple(part[rows] for part in batch)
    return {key: value[rows] for key, value in batch.items()}


def entropy_by_hand(
    attentions: list[Tensor], mask: Tensor | None, *, causal: bool
) -> list[list[float]]:
    """Loop over samples, heads and rows of softmax matrices `[batch, heads, rows, keys]`."""
    table = []
    for weights in attentions:
        weights = weights.double()
        row_of_heads = []
        for head in range(weights.shape[1]):
            samples = []
            for i, matrix in enumerate(weights[:, head]):
                real = range(len(matrix)) if mask is None else mask[i].nonzero().flatten().tolist()
                values = []
                for t in real:
                    seen = [k for k in real if k <= t] if causal else list(real)
                    if len(seen) > 1:
                        p = matrix[t, seen]
                        values.append(-float(torch.xlogy(p, p).sum()) / math.log(len(seen)))
                if values:
                    samples.append(sum(values) / len(values))
            row_of_heads.append(sum(samples) / len(samples))
        table.append(row_of_heads)
    return table


def eager_attentions(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the softmax matrices of an eager Hugging Face model."""
    inputs = (
        {"pixel_values": batch[0]}
        if isinstance(batch, tuple)
        else {key: value for key, value in batch.items() if key != "labels"}
    )
    with torch.no_grad():
        return list(model(**inputs, output_attentions=True).attentions)
