"""The families that users bring most often, and which models of the sweep stand for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SEQUENCE = "ForSequenceClassification"
_TEXTS = {
    "DeBERTa": "Deberta",
    "DeBERTa v2, v3": "DebertaV2",
    "ModernBERT": "ModernBert",
    "MPNet": "MPNet",
    "ALBERT": "Albert",
    "ESM": "Esm",
    "nomic": "NomicBert",
    "gte": "Gte",
    "jina v3": "JinaEmbeddingsV3",
    "EuroBERT": "EuroBert",
    "Longformer": "Longformer",
    "LayoutLM": "LayoutLM",
    "LayoutLM v3": "LayoutLMv3",
    "RemBERT": "RemBert",
    "RoFormer": "RoFormer",
    "TAPAS": "Tapas",
    "BART": "Bart",
    "T5": "T5",
    "wav2vec2": "Wav2Vec2",
    "HuBERT": "Hubert",
    "WavLM": "WavLM",
    "GPT-2": "GPT2",
    "OPT": "OPT",
    "Llama": "Llama",
    "Qwen2": "Qwen2",
    "Qwen3": "Qwen3",
    "Mistral": "Mistral",
    "Gemma 2": "Gemma2",
    "Gemma 3, text": "Gemma3Text",
    "Gemma 3, multimodal": "Gemma3",
    "T5Gemma2": "T5Gemma2",
    "ModernVBERT": "ModernVBert",
    "Phi-3": "Phi3",
    "SmolLM3": "SmolLM3",
}

POPULAR: dict[str, str] = {
    **{family: f"transformers/{name}{_SEQUENCE}" for family, name in _TEXTS.items()},
    "Whisper": "transformers/WhisperForAudioClassification",
    "AST": "transformers/ASTForAudioClassification",
    "VideoMAE": "transformers/VideoMAEForVideoClassification",
    "DINOv3 (timm)": "timm/vit_small_patch16_dinov3",
    "BEiT": "transformers/BeitForImageClassification",
    "BEiT v2 (timm)": "timm/beitv2_base_patch16_224",
    "EVA-02 (timm)": "timm/eva02_tiny_patch14_224",
    "CaiT (timm)": "timm/cait_xxs24_224",
    "XCiT (timm)": "timm/xcit_nano_12_p16_224",
    "Perception Encoder (timm)": "timm/vit_pe_core_tiny_patch16_384",
    "AIMv2 (timm)": "timm/aimv2_large_patch14_224",
    "torchvision ViT": "torchvision/VisionTransformer",
    "torchvision Swin": "torchvision/SwinTransformer",
    "Swin": "transformers/SwinForImageClassification",
    "Swin v2": "transformers/Swinv2ForImageClassification",
    "CLIP, zero-shot": "zero-shot/CLIP",
    "SigLIP, zero-shot": "zero-shot/SigLIP",
    "SigLIP 2, zero-shot": "zero-shot/SigLIP2",
    "Llama with a prompt": "prompted/Llama",
    "Qwen2 with a prompt": "prompted/Qwen2",
}
"""Family -> the model of the sweep that stands for it."""

_ENGINES = {"fused": "our own arithmetic", "host": "the host's own blocks"}


def popular_table(models: dict[str, Any]) -> str:
    """Return the table family -> how it is fused, or why not, and the share that is fused."""
    rows, fused = [], 0
    for family, name in sorted(POPULAR.items(), key=lambda item: item[0].lower()):
        result = models.get(name, {"verdict": "not run"})
        verdict, engine = result["verdict"], result.get("engine", "")
        fused += verdict == "fused"
        why = "" if verdict == "fused" and engine == "fused" else _short(result)
        how = f"fused, {_ENGINES[engine]}" if verdict == "fused" and engine else verdict
        rows.append(f"| {family} | {name.partition('/')[2]} | {how} | {why} |")
    head = "| family | model of the sweep | | why not our own arithmetic |\n|---|---|---|---|\n"
    return (
        f"{fused} of {len(POPULAR)} popular families ({fused / len(POPULAR):.0%}) are fused "
        "exactly. Our own arithmetic runs the last block for the tokens that are read only; the "
        f"host's own blocks run whole{_prices()}.\n\n{head}" + "\n".join(rows)
    )


def _prices() -> str:
    """Say what both engines cost, as `benchmarks/engines.py` counted it on a ViT-S."""
    path = Path(__file__).parent / "results" / "engines-vit-s.json"
    if not path.exists():
        return ""
    rows = {t["name"]: t["multiply_adds"] for t in json.loads(path.read_text())["timings"]}
    own, host = (rows[f"{engine}, last 1"] / rows["single"] for engine in ("fused", "host"))
    return (
        f", so that three members in the last block of a ViT-S cost {host:.2f} x instead of "
        f"{own:.2f} x (counted by `benchmarks/engines.py`, which times them, too)"
    )


def _short(result: dict[str, Any]) -> str:
    """Return why our own arithmetic, or any engine, does not run a model, in a few words."""
    reason = result.get("engine_why") or result.get("reason", "")
    reason = reason.partition(": runs the host's own blocks")[0].partition(". ")[0]
    reason = reason.partition(", which our own arithmetic")[0].partition(", which cannot be cut")[0]
    reason = re.sub(r" \([^)]*(Error|off by)[^)]*\)?.*", "", reason)  # details of a failed probe
    return reason.replace("|", "/")
