"""A zoo of tiny random host models, one of every supported family, with a batch each.

Two sizes. `make` and `host` give a model whose every part matters (weights scaled up): what is
gated, pruned, fused and saved. `sharp` gives a smaller one whose attention is far from uniform:
what is scored and searched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.uncertainty import term_choice

LAYERS, HEADS = 3, 4
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
}
SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
}
IMAGE = {"image_size": 16, "patch_size": 4}
TEXT = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 98, "pad_token_id": 0}
VOCABULARY = 50
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _vit(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**{**SIZES, **IMAGE, "num_labels": 5, **options}))


def _deit() -> nn.Module:
    from transformers import DeiTConfig, DeiTForImageClassification

    return DeiTForImageClassification(DeiTConfig(**SIZES, **IMAGE, num_labels=5))


def _deit_teacher() -> nn.Module:
    from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

    return DeiTForImageClassificationWithTeacher(DeiTConfig(**SIZES, **IMAGE, num_labels=5))


def _dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    return Dinov2ForImageClassification(Dinov2Config(**sizes, **IMAGE, mlp_ratio=2, num_labels=5))


def _bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**{**SIZES, **TEXT, "num_labels": 5, **options})
    return BertForSequenceClassification(config)


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**SIZES, **TEXT, num_labels=5))


def _distilbert(**options: Any) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48}
    config = DistilBertConfig(**{**sizes, "vocab_size": 99, "num_labels": 5, **options})
    return DistilBertForSequenceClassification(config)


def _clip_classifier() -> nn.Module:
    from transformers import CLIPConfig, CLIPForImageClassification

    config = CLIPConfig(
        vision_config={**SIZES, **IMAGE}, text_config={**SIZES, **TEXT}, num_labels=5
    )
    return CLIPForImageClassification(config)


def _clip_vision() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(CLIPVisionConfig(**SIZES, **IMAGE, projection_dim=16))


def _clip_text(**options: Any) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(**{**SIZES, **TEXT, "projection_dim": 16, **options})
    return CLIPTextModelWithProjection(config)


def _timm() -> nn.Module:
    import timm

    return timm.create_model(
        "deit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=32,
        depth=LAYERS,
        num_heads=HEADS,
        num_classes=5,
    )


def _timm_unusual() -> nn.Module:
    from timm.models import VisionTransformer

    return VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=32,
        depth=LAYERS,
        num_heads=HEADS,
        num_classes=5,
        global_pool="avg",
        qk_norm=True,
        init_values=0.3,
        reg_tokens=2,
    )


class WordTokenizer:
    """A real, small tokenizer: a word's id is its length and first letter; end of text is 98."""

    def ids(self, text: str) -> list[int]:
        return [1, *(3 + (len(w) * 7 + ord(w[0])) % 90 for w in text.split()), 98]

    def __call__(self, texts: list[str], **_: Any) -> Any:
        from transformers import BatchEncoding

        rows = [self.ids(text) for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids != 0).long()})


NAMES = ["cat", "big dog", "red bird", "fish", "old grey horse"]


def _zero_shot_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    from hydra_ensembles.hosts import ZeroShotClassifier

    config = CLIPConfig(
        vision_config={**SIZES, **IMAGE}, text_config={**SIZES, **TEXT}, projection_dim=16
    )
    return ZeroShotClassifier(
        CLIPModel(config).eval(), NAMES, ["a photo of a {}."], WordTokenizer()
    )


def _zero_shot_dual() -> nn.Module:
    from transformers import BertConfig, BertModel, VisionTextDualEncoderModel, ViTConfig, ViTModel

    from hydra_ensembles.hosts import ZeroShotClassifier

    dual = VisionTextDualEncoderModel(
        vision_model=ViTModel(ViTConfig(**SIZES, **IMAGE)),
        text_model=BertModel(BertConfig(**SIZES, **TEXT)),
    )
    return ZeroShotClassifier(dual.eval(), NAMES, ["a {}.", "the {}"], WordTokenizer())


def _open_clip_model() -> nn.Module:
    import open_clip

    return open_clip.CLIP(
        embed_dim=16,
        vision_cfg={
            "layers": LAYERS,
            "width": 32,
            "head_width": 8,
            "patch_size": 4,
            "image_size": 16,
        },
        text_cfg={"context_length": 9, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2},
    )


def _zero_shot_open_clip() -> nn.Module:
    from hydra_ensembles.hosts import ZeroShotClassifier

    def tokenizer(texts: list[str]) -> torch.Tensor:
        rows = [WordTokenizer().ids(text)[:9] for text in texts]
        return torch.tensor([row + [0] * (9 - len(row)) for row in rows])

    return ZeroShotClassifier(_open_clip_model().eval(), NAMES, ["a {}."], tokenizer)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=LAYERS, n_head=HEADS, **TEXT))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **TEXT, num_key_value_heads=2))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "vit": _vit,
    "deit": _deit,
    "deit-teacher": _deit_teacher,
    "dinov2": _dinov2,
    "bert": _bert,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "clip-classifier": _clip_classifier,
    "clip-vision": _clip_vision,
    "clip-text": _clip_text,
    "timm": _timm,
    "timm-unusual": _timm_unusual,
    "zero-shot-clip": _zero_shot_clip,
    "zero-shot-dual": _zero_shot_dual,
    "zero-shot-open-clip": _zero_shot_open_clip,
    "gpt2": _gpt2,
    "llama": _llama,
}
FUSABLE = [name for name in MAKERS if name not in ("gpt2", "llama")]
CLASSIFIERS = [name for name in FUSABLE if name not in ("clip-vision", "clip-text")]
TEXTS = {"bert", "roberta", "distilbert", "clip-text", "gpt2", "llama"}


def make(name: str) -> nn.Module:
    """Build a model of a family, seeded, its weights large enough for heads to matter."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = MAKERS[name]().eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if parameter.dim() == 2 and "embed" not in path:
                    parameter.mul_(3.0 / (parameter.std() * 3.0 * parameter.shape[-1] ** 0.5))
    return model


@cache
def host(name: str) -> nn.Module:
    """Return a shared model of a family; tests must not change it."""
    return make(name)


def batch(name: str, size: int = 4, seed: int = 1) -> Any:
    """Return a batch for a family: images, or padded token ids with their mask."""
    generator = torch.Generator().manual_seed(seed)
    if name not in TEXTS:
        return torch.randn(size, 3, 16, 16, generator=generator)
    ids = torch.randint(3, 97, (size, 7), generator=generator)
    lengths = [7 - (i * 2) % 5 for i in range(size)]
    mask = torch.tensor([[int(t < length) for t in range(7)] for length in lengths])
    for row, length in enumerate(lengths):
        ids[row, length - 1 :] = 98
    return {"input_ids": ids, "attention_mask": mask}


def run(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Call a model without gradients and return its main output."""
    from hydra_ensembles.hosts import main_output

    with torch.no_grad():
        return main_output(model(**inputs) if isinstance(inputs, dict) else model(inputs))


# Small hosts with sharp attention, for scores and searches: 24 wide, 3 classes.


def _gpt2_classifier(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
    config = GPT2Config(vocab_size=VOCABULARY, **sizes, **SPECIAL, num_labels=3, **options)
    return GPT2ForSequenceClassification(config)


def llama_config(**options: Any) -> Any:
    """Return the config of the small Llama, for other heads than the classifier's."""
    from transformers import LlamaConfig

    sizes = {**SMALL, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, **WORDS, **SPECIAL, num_labels=3, **options)


def _llama_classifier(**options: Any) -> nn.Module:
    from transformers import LlamaForSequenceClassification

    return LlamaForSequenceClassification(llama_config(**options))


def _timm_small(*, qk_norm: bool = False) -> nn.Module:
    from timm.models import VisionTransformer

    return VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=2,
        num_classes=3,
        qk_norm=qk_norm,
    )


def _open_clip_visual() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(
        image_size=16, patch_size=4, width=24, layers=2, heads=3, mlp_ratio=2, output_dim=3
    )


class OpenClipText(nn.Module):
    """open_clip's text tower, called with a batch's ids."""

    def __init__(self) -> None:
        super().__init__()
        from open_clip.transformer import TextTransformer

        self.tower = TextTransformer(
            context_length=7, vocab_size=VOCABULARY, width=24, heads=3, layers=2, output_dim=3
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tower(input_ids)


_DISTILBERT = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32}
_CLIP_TEXT = {**SMALL, **WORDS, "max_position_embeddings": 16, "projection_dim": 3}
_CLIP_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
SHARP: dict[str, tuple[Callable[..., nn.Module], float]] = {
    "bert": (
        partial(
            _bert,
            **{**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, **WORDS, **SPECIAL},
            num_labels=3,
        ),
        25.0,
    ),
    "distilbert": (partial(_distilbert, **_DISTILBERT, **WORDS, num_labels=3), 25.0),
    "vit": (partial(_vit, **SMALL, num_labels=3), 25.0),
    "clip_text": (partial(_clip_text, **_CLIP_TEXT, **_CLIP_SPECIAL), 6.0),
    "gpt2": (_gpt2_classifier, 25.0),
    "llama": (_llama_classifier, 25.0),
    "timm": (_timm_small, 6.0),
    "timm_qk_norm": (partial(_timm_small, qk_norm=True), 6.0),
    "open_clip_visual": (_open_clip_visual, 6.0),
    "open_clip_text": (OpenClipText, 6.0),
}
"""How each small host is built, and by how much its attention is sharpened."""


def seeded(build: Callable[[], nn.Module], *, sharpen: float = 6.0) -> nn.Module:
    """Build a model from a fixed seed; larger weights make attention that is not uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and any(
                    part in name for part in ("attn", "attention", "q_lin", "k_lin", "in_proj")
                ):
                    parameter.mul_(sharpen)
    return model


def sharp(name: str, backend: str | None = None) -> nn.Module:
    """Build a small host by name; `backend` is `eager` or `sdpa`, for Hugging Face models."""
    build, sharpen = SHARP[name]
    options = {} if backend is None else {"attn_implementation": backend}
    return seeded(partial(build, **options), sharpen=sharpen)


def with_classes(name: str, backend: str | None = None) -> nn.Module:
    """Build a small host by name; the directions that a tower projects to are its classes."""
    from hydra_ensembles.tasks import Embedding, MultiClass

    class Directions(MultiClass):
        fields = Embedding.fields

    model = sharp(name, backend)
    if name in ("clip_text", "open_clip_visual", "open_clip_text"):
        model.task = Directions()
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


def labelled(name: str) -> Any:
    """Return a labelled batch for a small host."""
    if name in ("vit", "timm", "timm_qk_norm", "open_clip_visual"):
        return images()
    if name == "open_clip_text":  # it pads by itself and takes no mask
        batch = texts((7, 7, 7, 7))
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    return texts()


def any_longer_sum(patch: pytest.MonkeyPatch) -> None:
    """Let terms of novelty join on a few examples, whatever they gain."""
    for name, value in (("EXAMPLES", 20), ("PER_CLASS", 1), ("CLASSES", 3)):
        patch.setattr(term_choice, f"LEAST_{name}", value)
    patch.setattr(term_choice, "FOLDS", 3)
    for name in ("gains", "clear"):
        patch.setattr(term_choice.Verdict, name, property(lambda self: True))
