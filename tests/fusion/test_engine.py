"""The engine's two forms, grouped and separate products, agree; rows may run in parts."""

from __future__ import annotations

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.fusion import fused_block as layers
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, SWITCHES, TREE, gated, members_of

EQUAL_GROUPS = [
    HeadMask([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]]),
    HeadMask([[0, 1, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]]),
    HeadMask([[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]]),
]


@pytest.mark.parametrize("name", ["vit", "bert", "timm-unusual", "clip-text"])
@pytest.mark.parametrize("masks", [EQUAL_GROUPS, EARLY, LATE, TREE])
def test_grouped_products_equal_separate_ones(name: str, masks: list[HeadMask]) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    expected = gated(model, masks, inputs)
    for switches in SWITCHES:
        ensemble = hydra.fuse(model, masks, **switches)
        for grouped in (True, False):
            for block in ensemble.body.branch:
                block.grouped = grouped
            torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)


def test_equal_groups_are_packed_in_one_tensor_that_the_parts_view() -> None:
    bank = hydra.fuse(zoo.host("vit"), EQUAL_GROUPS).body.branch[1].bank
    with torch.no_grad():
        packed = bank.packed()
    assert packed.qkv is not None
    assert packed.output is not None
    assert packed.qkv[0].shape == (3, 3 * 2 * 8, 32)
    start = packed.qkv[0].data_ptr()
    assert [w.data_ptr() - start for _, w, _ in packed.projections] == [
        i * 3 * 2 * 8 * 32 * 4 for i in range(3)
    ]


@pytest.mark.parametrize("name", ["vit", "bert", "timm-unusual", "distilbert"])
def test_rows_in_parts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    expected = members_of(ensemble, zoo.batch(name))
    calls: list[int] = []
    for block in ensemble.body.branch:
        block.norm2.register_forward_hook(lambda m, i, o: calls.append(i[0].shape[1]))
    monkeypatch.setattr(layers, "CACHED_BYTES", 1000)
    actual = members_of(ensemble, zoo.batch(name))
    assert len(calls) > 3 * len(ensemble.body.branch), "rows run in parts"
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
