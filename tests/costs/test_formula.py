"""Counted cost agrees with a counter on a real run, and adds up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs.formula import CostModel, cost
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts.operation_count import multiply_adds
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, SWITCHES, TREE

HOSTS = [name for name in zoo.FUSABLE if name != "clip-classifier"]


def counted(model: nn.Module, inputs: object) -> int:
    return multiply_adds(lambda: model(**inputs) if isinstance(inputs, dict) else model(inputs))


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_and_ensembles_agree_with_a_real_run(name: str) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    assert cost(model, inputs).multiply_adds == pytest.approx(counted(model, inputs), rel=0.01)
    for masks in (LATE, EARLY, TREE):
        for switches in (SWITCHES[0], SWITCHES[-1]):
            ensemble = hydra.fuse(model, masks, **switches)
            assert cost(ensemble, inputs).multiply_adds == pytest.approx(
                counted(ensemble, inputs), rel=0.01
            )


@pytest.mark.parametrize("name", ["vit", "bert", "timm", "clip-text", "zero-shot-clip"])
@pytest.mark.parametrize("switches", SWITCHES)
def test_the_plan_alone_counts_what_the_ensemble_counts(name: str, switches: dict) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    ensemble = hydra.fuse(model, EARLY, **switches)
    whole = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
    assert CostModel(model, inputs).ratio(EARLY, **switches) == pytest.approx(whole, rel=1e-9)


def deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    more = {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
    config = DebertaV2Config(**zoo.SIZES, **zoo.TEXT, **more, num_labels=5)
    return DebertaV2ForSequenceClassification(config)


def longformer() -> nn.Module:
    from transformers import LongformerConfig, LongformerForSequenceClassification

    config = LongformerConfig(**zoo.SIZES, **zoo.TEXT, attention_window=4, num_labels=5)
    return LongformerForSequenceClassification(config)


def swin() -> nn.Module:
    import timm

    sizes = {"img_size": 32, "patch_size": 4, "window_size": 2, "embed_dim": 16}
    return timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=5, depths=(1, 2), num_heads=(2, 4), **sizes
    )


@pytest.mark.parametrize("make", [deberta, longformer, swin])
def test_hosts_that_run_their_own_blocks_are_counted(make: Callable[[], nn.Module]) -> None:
    """DeBERTa slices parameters, Longformer pads, Swin's states are [batch, y, x, width]."""
    model = zoo.seeded(make)
    picture = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = picture if make is swin else zoo.batch("bert")
    masks = [HeadMask([[1] * 4, row]) for row in ([1, 1, 0, 0], [0, 1, 0, 1])]
    masks = masks if make is swin else EARLY
    assert cost(model, inputs).multiply_adds == pytest.approx(counted(model, inputs), rel=0.01)
    ensemble = hydra.fuse(model, masks)
    assert ensemble.engine == "host"
    whole = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
    assert CostModel(model, inputs).ratio(masks) == pytest.approx(whole, rel=1e-6)


def test_a_group_of_queries_goes_from_the_trunk_as_a_whole() -> None:
    model, inputs = zoo.host("llama"), zoo.batch("llama")  # two groups of two heads
    rows = [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    for first in ([1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]):
        masks = [HeadMask([first, [1] * 4, row]) for row in rows]
        ensemble = hydra.fuse(model, masks)
        assert ensemble.engine == "fused" and ensemble.plan.trunk == 2
        whole = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
        assert CostModel(model, inputs).ratio(masks) == pytest.approx(whole, rel=1e-9)


def test_parts_add_up_and_shared_things_count_once() -> None:
    model, inputs = zoo.host("vit"), zoo.batch("vit")
    ensemble = hydra.fuse(model, LATE)
    for one in (cost(model, inputs), cost(ensemble, inputs)):
        assert sum(layer.multiply_adds for layer in one.layers) == one.multiply_adds
        assert sum(layer.parameters for layer in one.layers) == one.parameters
        assert max(layer.activation_bytes for layer in one.layers) == one.activation_bytes
        assert "multiply-adds" in str(one)
    assert cost(ensemble, inputs).parameters == sum(p.numel() for p in ensemble.parameters())
    assert cost(ensemble, inputs).parameters <= cost(model, inputs).parameters


def test_cost_grows_with_the_batch_and_falls_with_pruned_trunk_heads() -> None:
    model = zoo.host("vit")
    one, four = (cost(model, zoo.batch("vit", size=n)).multiply_adds for n in (1, 4))
    assert four == 4 * one
    counter = CostModel(model, zoo.batch("vit"))
    pruned = [HeadMask([[1, 0, 0, 0], *mask.tolist()[1:]]) for mask in LATE]
    assert counter.ratio(pruned) < counter.ratio(LATE)
    assert counter.ratio([HeadMask.full(model)], readout_only=False) == 1.0
    assert counter.ratio([HeadMask.full(model)]) < 1.0


def test_loop_counts_every_member() -> None:
    model, inputs = zoo.host("vit"), zoo.batch("vit")
    loop = hydra.fuse(model, EARLY, mode="loop")
    assert cost(loop, inputs).multiply_adds == pytest.approx(counted(loop, inputs), rel=0.01)
    assert cost(loop, inputs).multiply_adds > cost(hydra.fuse(model, EARLY), inputs).multiply_adds


def test_a_batch_that_the_model_cannot_take_is_named() -> None:
    with pytest.raises(DataError, match="cannot be run"):
        cost(zoo.host("vit"), torch.zeros(2, 1, 16, 16))


def test_the_papers_design_costs_what_the_method_page_says() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device("meta"):
        shape = ViTForImageClassification(ViTConfig(num_labels=1000))
    model = shape.to_empty(device="cpu").eval()
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # the readout is found by running it
            parameter.uniform_(-0.05, 0.05, generator=draws)
    batch = torch.zeros(1, 3, 224, 224)
    third = [HeadMask([[h % 3 == m for h in range(12)]] * 12) for m in range(3)]
    counted = CostModel(model, batch)
    assert counted.ratio(third, readout_only=False) == pytest.approx(2.27, abs=0.01)
    two = [HeadMask([[1] * 12] * 10 + [[h % 3 == m for h in range(12)]] * 2) for m in range(3)]
    assert counted.ratio(two) == pytest.approx(1.04, abs=0.01)


def test_gates_that_cost_a_product_of_their_own_are_planned() -> None:
    """Torchvision's windows project inside one function: a gate before W_O needs a second one."""
    models = pytest.importorskip("torchvision.models")
    model = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], num_classes=5).eval()
    images = torch.zeros(2, 3, 32, 32)
    full = HeadMask.full(model)
    last = len(full) - 1
    masks = [full.with_layer(last, [head != member for head in range(4)]) for member in range(2)]
    ran = cost(hydra.fuse(model, masks), images).relative_to(cost(model, images)).multiply_adds
    assert CostModel(model, images).ratio(masks) == pytest.approx(ran)
