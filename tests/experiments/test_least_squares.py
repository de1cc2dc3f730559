"""Rows of the tables on least squares: Torch-Pruning cuts heads and neurons of plain hosts."""

import copy
from typing import Any

import pytest
import torch
from lab.least_squares import _cut
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": 3,
}


class Batches:
    """A task whose training data is one batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def training(self, part: str, count: int) -> list[Any]:
        return [self.batch]


def bert() -> tuple[nn.Module, Any]:
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES))
    model.bert.embeddings.requires_grad_(False)  # as fine-tuned hosts
    ids = torch.randint(0, 50, (4, 7))
    labels = torch.tensor([0, 1, 2, 0])
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def vit() -> tuple[nn.Module, Any]:
    config = ViTConfig(image_size=16, patch_size=4, **SIZES)
    labels = torch.tensor([0, 1, 2, 0])
    return ViTForImageClassification(config), (torch.randn(4, 3, 16, 16), labels)


@pytest.mark.filterwarnings("ignore:Unwrapped parameters")
@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("make", [bert, vit])
def test_torch_pruning_halves_neurons_and_heads(make: Any, heads: bool) -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model, batch = make()
    for _ in range(2):  # its pruners share their default arguments
        cut = _cut(Batches(batch), copy.deepcopy(model.eval()), 0.5, heads=heads)
    shapes = [tuple(one.weight.shape) for one in cut.modules() if isinstance(one, nn.Linear)]
    width = 16 if heads else 32
    layer = [(width, 32)] * 3 + [(32, width), (32, 32), (32, 32)]
    assert shapes[:12] == layer * 2
    given = dict(list(batch.items())[:2]) if isinstance(batch, dict) else {"pixel_values": batch[0]}
    assert cut(**given).logits.shape == (4, 3)
