"""Host models are found by their structure; what cannot be pruned is said clearly."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import Family, HeadMask
from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.hosts import host_model
from tests import zoo
from tests.fusion.test_fusion import EARLY, gated, members_of

READOUT = {
    "vit": "token 0",
    "deit": "token 0",
    "deit-teacher": "tokens 0-1",
    "dinov2": "all tokens",
    "bert": "token 0",
    "roberta": "token 0",
    "distilbert": "token 0",
    "clip-classifier": "all tokens",
    "clip-vision": "token 0",
    "clip-text": "the end-of-text token of each sample",
    "timm": "token 0",
    "timm-unusual": "all tokens",
    "zero-shot-clip": "token 0",
    "zero-shot-dual": "token 0",
    "zero-shot-open-clip": "token 0",
}


@pytest.mark.parametrize("name", zoo.FUSABLE)
def test_explain_tells_the_structure(name: str) -> None:
    found = hydra.explain(zoo.host(name))
    assert found.supported
    assert found.fusable
    assert found.removable
    assert found.head_counts == (zoo.HEADS,) * zoo.LAYERS
    assert (found.head_dim, found.width) == (8, 32)
    assert found.norm == ("post" if name in ("bert", "roberta", "distilbert") else "pre")
    assert found.readout == READOUT[name]
    assert name in READOUT
    assert "can be fused" in str(found)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_are_computed_by_our_own_arithmetic(name: str) -> None:
    found = hydra.explain(zoo.host(name))
    assert found.supported
    assert found.fusable
    assert found.causal
    assert found.engine == "fused"
    assert ("rotary positions included" in str(found)) == (name == "llama")


def test_the_price_of_the_hosts_own_blocks_is_told() -> None:
    from transformers import MixtralConfig, MixtralForSequenceClassification

    sizes = {**zoo.SIZES, **zoo.TEXT, "num_key_value_heads": 2, "num_local_experts": 2}
    found = hydra.explain(MixtralForSequenceClassification(MixtralConfig(**sizes)))
    assert found.engine == "host"
    assert "runs the host's own blocks; three members in the last block cost 1." in str(found)


class Attention(nn.Module):
    """An attention under names of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads_of_mine = heads
        self.head_dim = width // heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.back = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MyBlock(nn.Module):
    def __init__(self, width: int, heads: int, parallel: bool = False) -> None:
        super().__init__()
        self.mix = Attention(width, heads)
        self.ln_a, self.ln_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel:
            return x + self.mix(self.ln_a(x)) + self.feed(self.ln_b(x))
        x = x + self.mix(self.ln_a(x))
        return x + self.feed(self.ln_b(x))


class Mine(nn.Module):
    """A classifier that no library knows: [batch, tokens, width] in, logits out."""

    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList([MyBlock(16, 4, parallel) for _ in range(3)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(1))


MINE = Family(
    name="mine",
    query="mix.to_q",
    key="mix.to_k",
    value="mix.to_v",
    output="mix.back",
    norm1="ln_a",
    norm2="ln_b",
    mlp="feed",
)


def test_a_model_of_ones_own_takes_a_short_mapping() -> None:
    torch.manual_seed(0)
    model = Mine().eval()
    with pytest.raises(UnsupportedModelError, match=r"hydra\.Family"):
        hydra.fuse(model, EARLY)
    assert "stages (3 x MyBlock)" in str(hydra.explain(model))
    ensemble = hydra.fuse(model, EARLY, family=MINE)
    inputs = torch.randn(4, 6, 16)
    host = host_model(model, family=MINE)
    expected = gated_with(host, inputs)
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)
    assert str(ensemble.readout) == "all tokens"  # unknown pooling never gives a wrong result


def gated_with(host: object, inputs: torch.Tensor) -> torch.Tensor:
    outputs = []
    for mask in EARLY:
        with hydra.gate(host, mask), torch.no_grad():  # type: ignore[arg-type]
            outputs.append(host.model(inputs))  # type: ignore[attr-defined]
    return torch.stack(outputs, 1)


def test_parallel_blocks_are_refused_for_fusing() -> None:
    with pytest.raises(UnsupportedModelError, match="something else"):
        hydra.fuse(Mine(parallel=True).eval(), EARLY, family=MINE)


def test_relative_positions_that_no_table_tells_are_refused() -> None:
    import timm

    model = timm.create_model(  # an MLP makes the bias of all heads
        "vit_relpos_base_patch16_cls_224",
        **{"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4},
        num_classes=5,
    ).eval()
    found = hydra.explain(model)
    assert not found.removable
    assert "rel_pos.mlp" in found.reason
    with pytest.raises(UnsupportedModelError, match=r"rel_pos\.mlp"):
        hydra.prune_heads_(model, HeadMask.random(model))
    with hydra.gate(model, ~HeadMask.full(model)), torch.no_grad():
        model(torch.randn(1, 3, 32, 32))


def test_a_model_without_attention_is_explained() -> None:
    found = hydra.explain(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert not found.supported
    assert "has no attention heads" in str(found)


def test_grouped_queries_lose_whole_groups_only() -> None:
    model = copy.deepcopy(zoo.host("llama"))
    with pytest.raises(UnsupportedModelError, match="group 0"):
        hydra.prune_heads_(model, HeadMask([[1, 0, 1, 1]] * 3))
    assert host_model(model).head_counts == (4, 4, 4), "nothing was cut before the error"
    mask = HeadMask([[1, 1, 0, 0]] * 3)
    expected = gated(model, [mask], zoo.batch("llama"))[:, 0]
    pruned = zoo.run(hydra.prune_heads_(model, mask), zoo.batch("llama"))
    torch.testing.assert_close(pruned, expected, atol=1e-5, rtol=0)


def test_dual_encoders_are_about_their_image_tower() -> None:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        vision_config={**zoo.SIZES, **zoo.IMAGE}, text_config={**zoo.SIZES, **zoo.TEXT}
    )
    found = hydra.explain(CLIPModel(config).eval())
    assert found.blocks == "vision_model.encoder.layers"
    assert "two towers" in str(found)


def test_zero_shot_logits_are_scaled_cosines() -> None:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        vision_config={**zoo.SIZES, **zoo.IMAGE},
        text_config={**zoo.SIZES, **zoo.TEXT},
        projection_dim=16,
    )
    clip = CLIPModel(config).eval()
    classifier = hydra.ZeroShotClassifier(clip, zoo.NAMES, ["a {}."], zoo.WordTokenizer())
    images = zoo.batch("zero-shot-clip")
    tokens = zoo.WordTokenizer()([f"a {name}." for name in zoo.NAMES])
    with torch.no_grad():
        expected = clip(pixel_values=images, **tokens).logits_per_image
        actual = classifier(images).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert classifier.id2label[1] == "big dog"
    with pytest.raises(ValueError, match="tokenizer"):
        hydra.ZeroShotClassifier(clip, zoo.NAMES)
