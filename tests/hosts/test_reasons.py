"""Reasons name ideas and modules, not every tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles.hosts.reasons import at_layer, describe_argument, describe_parameters
from tests import zoo


def bart() -> nn.Module:
    from transformers import BartConfig, BartForSequenceClassification

    sizes = {"d_model": 32, "max_position_embeddings": 64}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 3, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
    return BartForSequenceClassification(BartConfig(**sizes, **zoo.TEXT, num_labels=5))


def wavlm() -> nn.Module:
    from transformers import WavLMConfig, WavLMForSequenceClassification

    sizes = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
    positions = {"num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 4}
    config = WavLMConfig(**zoo.SIZES, **sizes, **positions, num_labels=5)
    return WavLMForSequenceClassification(config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bart, "its blocks also have attention to an encoder (encoder_attn"),
        (wavlm, "layer 1: its blocks take a position bias shared by all blocks ("),  # not 'index'
    ],
)
def test_the_engine_is_explained_in_words(make: Callable[[], nn.Module], words: str) -> None:
    why = hydra.explain(zoo.seeded(make)).engine_why
    assert why.startswith(words)
    assert ".weight" not in why and len(why) < 250
    assert "runs the host's own blocks; three members in the last block cost" in why


def test_arguments_have_names() -> None:
    assert describe_argument("rope") == "rotary positions ('rope')"
    assert describe_argument("strange") == "'strange'"


def test_modules_are_named_once_and_few() -> None:
    names = ["pos_proj.weight", "pos_proj.bias", "pos_q_proj.weight"]
    expected = "relative positions (pos_proj, pos_q_proj)"
    assert describe_parameters(names, of_attention=True) == expected
    many = [f"part{i}.inner.{j}.weight" for i in range(5) for j in range(2)]
    expected = "other parts (part0, part1, part2 and 2 more)"
    assert describe_parameters(many, of_attention=False) == expected
    assert describe_parameters(["norm.weight"], of_attention=True) == "a norm over all heads (norm)"
    assert describe_parameters(["norm.weight"], of_attention=False) == "other parts (norm)"


def test_the_first_layer_stands_for_all() -> None:
    assert at_layer(0, "it has experts") == "it has experts"
    assert at_layer(2, "it has experts") == "layer 2: it has experts"
