"""Which stack of blocks is meant, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles.hosts import host_model
from tests import zoo


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Unknown(nn.Module):
    """A classifier whose blocks no family names."""

    def __init__(self, blocks: int = 2, attentions: int = 1) -> None:
        super().__init__()
        kinds = [[Attention() for _ in range(attentions)] for _ in range(blocks)]
        self.stem = nn.Linear(8, 16)
        self.steps = nn.ModuleList(
            [nn.ModuleDict({f"mix{i}": a for i, a in enumerate(kind)}) for kind in kinds]
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for step in self.steps:
            for mix in step.values():  # type: ignore[operator]
                x = x + mix(x)
        return self.head(x.mean(1))


def test_blocks_are_found_by_the_names_of_their_linears() -> None:
    torch.manual_seed(0)
    model = Unknown().eval()
    host = host_model(model)
    assert host.family.name == "found"
    assert host.blocks_path == "steps"
    assert host.head_counts == (4, 4)
    x = torch.randn(2, 5, 8)
    mask = hydra.HeadMask([[1, 0, 1, 1], [0, 1, 1, 0]])
    with torch.no_grad(), hydra.gate(model, mask):
        gated = model(x)
    for layer, row in enumerate(mask):  # the same by hand: columns of W_O
        weight: Any = host.sites[layer].output.weight
        weight.data *= row.repeat_interleave(4)
    torch.testing.assert_close(gated, model(x))


def test_two_attentions_in_a_block_are_refused_by_name() -> None:
    with pytest.raises(hydra.HydraError, match=r"2 attention modules .*mix0\.to_out, mix1\.to_out"):
        host_model(Unknown(attentions=2))


def test_gates_without_effect_are_an_error() -> None:
    class Closed(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.to_v(x), self.to_out.weight, self.to_out.bias)

    model = Unknown()
    for step in model.steps:
        step["mix0"] = Closed()  # type: ignore[index]
    gated = hydra.gate(model, hydra.HeadMask([[1, 0, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(hydra.HydraError, match="never calls"), gated:
        model(torch.randn(2, 5, 8))


def test_a_hybrid_says_which_block_has_no_heads() -> None:
    model = Unknown(3)
    model.steps[1] = nn.ModuleDict({"mix0": nn.Linear(16, 16)})
    with pytest.raises(hydra.HydraError, match="2 of the 3"):
        host_model(model)


def test_adapters_are_told_to_be_merged() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value"], r=2)
    model = peft.get_peft_model(zoo.make("bert"), config)
    with pytest.raises(hydra.HydraError, match="merge_and_unload"):
        host_model(model)
    assert not hydra.explain(model).supported
    assert hydra.explain(model.merge_and_unload()).fusable


def test_quantised_models_are_refused() -> None:
    model = zoo.make("bert")
    model.bert.encoder.layer[0].attention.self.query.weight = nn.Parameter(  # type: ignore
        torch.zeros(32, 32, dtype=torch.int8), requires_grad=False
    )
    assert "quantised" in hydra.explain(model).reason


def test_the_text_stack_of_a_multimodal_classifier_is_meant() -> None:
    from transformers import Gemma3Config, Gemma3ForSequenceClassification

    text = {**zoo.SIZES, **zoo.TEXT, "num_key_value_heads": 2, "head_dim": 8}
    config = Gemma3Config(text_config=text, vision_config={**zoo.SIZES, **zoo.IMAGE}, num_labels=3)
    host = host_model(Gemma3ForSequenceClassification(config))
    assert host.blocks_path == "model.language_model.layers"
    assert any("vision" in path for path in host.other_stacks)


def test_the_decoder_of_an_encoder_decoder_is_meant() -> None:
    from transformers import BartConfig, BartForSequenceClassification

    config = BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        **zoo.TEXT,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    host = host_model(BartForSequenceClassification(config))
    assert host.blocks_path == "model.decoder.layers"


@torch.no_grad()
def test_zero_shot_siglip_is_a_host() -> None:
    from transformers import SiglipConfig, SiglipModel

    sizes = {**zoo.SIZES, "vocab_size": 99, "max_position_embeddings": 9}
    torch.manual_seed(0)
    config = SiglipConfig(vision_config={**zoo.SIZES, **zoo.IMAGE}, text_config=sizes)

    class Fixed(zoo.WordTokenizer):
        def __call__(self, texts: list[str], **options: Any) -> Any:
            assert options["padding"] == "max_length"
            batch = super().__call__(texts)
            room = options["max_length"] - batch["input_ids"].shape[1]
            return batch.__class__({k: nn.functional.pad(v, (0, room)) for k, v in batch.items()})

    dual = SiglipModel(config).eval()
    model = hydra.ZeroShotClassifier(dual, zoo.NAMES, ["a {}."], Fixed()).eval()
    images = zoo.batch("vit")
    tokens = Fixed()([f"a {n}." for n in zoo.NAMES], padding="max_length", max_length=9)
    plain = dual(input_ids=tokens["input_ids"], pixel_values=images)
    expected = plain.logits_per_image - dual.logit_bias
    torch.testing.assert_close(model(images).logits, expected, atol=1e-4, rtol=1e-4)
    ensemble = hydra.fuse(model, [hydra.HeadMask([[1] * 4, [1] * 4, row]) for row in _ROWS])
    assert hydra.verify(ensemble, images).largest < 1e-4


_ROWS = [[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]


def _resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet18", num_classes=3)


def _squeezebert() -> nn.Module:
    from transformers import SqueezeBertConfig, SqueezeBertForSequenceClassification

    config = SqueezeBertConfig(**zoo.SIZES, **zoo.TEXT, embedding_size=32)
    return SqueezeBertForSequenceClassification(config)


def _xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetForSequenceClassification

    return XLNetForSequenceClassification(
        XLNetConfig(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=48)
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_resnet, "ResNet .*attention heads"),
        (_squeezebert, "convolutions.*SqueezeBertSelfAttention"),
        (_xlnet, r"bare parameters.*XLNetRelativeAttention.*transformer\.layer\.0\.rel_attn"),
    ],
)
def test_a_refusal_says_what_the_model_lacks(make: Any, why: str) -> None:
    with pytest.raises(hydra.HydraError, match=why):
        host_model(make())


def test_blocks_that_only_update_the_class_token_belong_to_the_readout() -> None:
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = timm.create_model("cait_xxs24_224", num_classes=5, **sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name:
                parameter.fill_(0.5)
    view = host_model(model)
    assert (view.blocks_path, view.other_stacks) == ("blocks", ("blocks_token_only",))
    ensemble = hydra.fuse(model, [hydra.HeadMask([[1] * 4, row]) for row in _ROWS])
    assert hydra.verify(ensemble, torch.randn(2, 3, 32, 32)).largest < 1e-4


def test_windows_of_torchvision_are_opened() -> None:
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(images)
        with hydra.gate(model, hydra.HeadMask.full(model)):
            torch.testing.assert_close(model(images), plain)
        with hydra.gate(model, hydra.HeadMask([[1, 1, 0, 1], [0, 1, 1, 0]])):
            gated = model(images)
        for block, row in zip(model.features[3], ([1, 1, 0, 1], [0, 1, 1, 0]), strict=True):
            block.attn.proj.weight *= torch.tensor(row).repeat_interleave(8)
        torch.testing.assert_close(model(images), gated)
    assert (gated - plain).abs().max() > 1e-4
