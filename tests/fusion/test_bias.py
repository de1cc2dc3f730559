"""A bias of each head, which the host hands to all blocks, by our own arithmetic."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs.formula import CostModel, cost
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.trunk_cache import Prefix
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, TREE, gated, members_of
from tests.fusion.test_hosted import batch, host

PRUNED_TRUNK = [HeadMask([[1, 0, 1, 1], [0, 0, 0, 1], mask[2].tolist()]) for mask in LATE]


@cache
def mpnet() -> nn.Module:
    """Make a tiny MPNet with weights large enough for every part to matter."""
    from transformers import MPNetConfig, MPNetForSequenceClassification

    torch.manual_seed(0)
    model = MPNetForSequenceClassification(MPNetConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "relative_attention_bias" in name:
                parameter.copy_(noise)
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def case(name: str) -> tuple[nn.Module, Any]:
    if name == "srelpos":
        return host(name), batch(name)
    return mpnet(), batch("bert")


@pytest.mark.parametrize("masks", [LATE, EARLY, TREE, PRUNED_TRUNK])
@pytest.mark.parametrize("name", ["mpnet", "srelpos"])
def test_members_take_the_bias_of_their_own_heads(name: str, masks: Any) -> None:
    model, inputs = case(name)
    ensemble = hydra.fuse(model, masks, engine="fused")
    assert ensemble.switches["biased"] is True
    expected = gated(model, masks, inputs)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=2e-5 * scale, rtol=0)
    ensemble.mode = "loop"
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=2e-5 * scale, rtol=0)
    ensemble.mode = "fused"
    ensemble.untie_()
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=2e-5 * scale, rtol=0)


def test_it_is_told_saved_counted_and_searched(tmp_path: Path) -> None:
    model, inputs = case("mpnet")
    assert "the bias of each head included" in str(hydra.explain(model))
    ensemble = hydra.fuse(model, PRUNED_TRUNK)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(members_of(loaded, inputs), members_of(ensemble, inputs))
    ratio = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
    assert CostModel(model, inputs).ratio(PRUNED_TRUNK) == pytest.approx(ratio, rel=0.02)
    data = [{**inputs, "labels": torch.tensor([0, 1, 2, 3])}]
    found = Prefix(host_model(model), {"id": data}).logits([*EARLY, *LATE]).logits["id"]
    torch.testing.assert_close(found, gated(model, [*EARLY, *LATE], inputs), atol=1e-4, rtol=0)
