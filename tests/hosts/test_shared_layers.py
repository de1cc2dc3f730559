"""ALBERT, whose layers share weights: every call of the shared layer has its own heads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, members_of


def albert(groups: int = 1) -> Any:
    """Make a tiny ALBERT with weights large enough for every part to matter."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    torch.manual_seed(0)
    config = AlbertConfig(
        **zoo.SIZES, **zoo.TEXT, embedding_size=16, num_hidden_groups=groups, num_labels=5
    )
    model = AlbertForSequenceClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(noise * scale + ("LayerNorm.weight" in name or "norm.weight" in name))
    return model


@torch.no_grad()
def by_hand(model: Any, mask: HeadMask, inputs: dict[str, Tensor]) -> Tensor:
    """Run a model whose groups of layers are apart, with the columns of W_O zeroed."""
    twin = copy.deepcopy(model)
    encoder = twin.albert.encoder
    per = len(mask) // len(encoder.albert_layer_groups)
    layers = [copy.deepcopy(encoder.albert_layer_groups[i // per]) for i in range(len(mask))]
    for layer, row in zip(layers, mask, strict=True):
        layer.albert_layers[0].attention.dense.weight *= row.repeat_interleave(8)
    encoder.albert_layer_groups = nn.ModuleList(layers)
    encoder.config.num_hidden_groups = len(layers)
    return twin(**inputs).logits


@pytest.mark.parametrize("groups", [1, 3])
@torch.no_grad()
def test_each_call_of_a_shared_layer_is_gated_by_its_own_row(groups: int) -> None:
    model, inputs = albert(groups), zoo.batch("bert")
    plain = model(**inputs).logits
    for mask in (*EARLY, *LATE):
        expected = by_hand(model, mask, inputs)
        with hydra.gate(model, mask):
            for _ in range(2):  # every pass counts from its beginning
                gated = model(**inputs).logits
                torch.testing.assert_close(gated, expected)
        assert (gated - plain).abs().max() > 1e-3
    torch.testing.assert_close(model(**inputs).logits, plain)


def test_shared_layers_fuse_and_come_back(tmp_path: Path) -> None:
    model, inputs = albert(), zoo.batch("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number, masks in enumerate((EARLY, LATE)):
        expected = torch.stack([by_hand(model, mask, inputs) for mask in masks], 1)
        ensemble = hydra.fuse(model, masks)
        assert ensemble.engine == "fused"
        torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=1e-5)
        ensemble.save_pretrained(tmp_path / str(number))
        loaded = hydra.HydraEnsemble.from_pretrained(tmp_path / str(number))
        torch.testing.assert_close(members_of(loaded, inputs), expected, atol=1e-5, rtol=1e-5)
        for member in range(3):
            alone = zoo.run(ensemble.member(member), inputs)
            torch.testing.assert_close(alone, expected[:, member], atol=1e-5, rtol=1e-5)
    assert model.config.num_hidden_groups == 1
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_layer_without_heads_keeps_its_norm() -> None:
    model, inputs = albert(), zoo.batch("bert")
    masks = [HeadMask([[0] * 4, [1] * 4, row]) for row in ([1, 0, 1, 0], [0] * 4)]
    expected = torch.stack([by_hand(model, mask, inputs) for mask in masks], 1)
    ensemble = hydra.fuse(model, masks)
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=1e-5)
    ensemble.mode = "loop"
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=1e-5)


def test_heads_of_shared_layers_are_not_removed_in_place() -> None:
    model = albert()
    told = hydra.explain(model)
    assert told.fusable and not told.removable
    assert told.head_counts == (4, 4, 4)
    with pytest.raises(hydra.HydraError, match="share one set"):
        hydra.prune_heads_(model, LATE[0])
