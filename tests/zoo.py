"""A zoo of tiny random host models, one of every supported family, with a batch each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

LAYERS, HEADS = 3, 4
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
}
IMAGE = {"image_size": 16, "patch_size": 4}
TEXT = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 98, "pad_token_id": 0}


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, **IMAGE, num_labels=5))


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


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, **TEXT, num_labels=5))


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**SIZES, **TEXT, num_labels=5))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        dim=32, n_layers=LAYERS, n_heads=HEADS, hidden_dim=48, vocab_size=99, num_labels=5
    )
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


def _clip_text() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(**SIZES, **TEXT, projection_dim=16))


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
