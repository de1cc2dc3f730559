"""Our own arithmetic beyond Llama: tables by relative position, bare scales, windows by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs.formula import CostModel, cost
from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.operation_count import multiply_adds
from hydra_ensembles.search.trunk_cache import Prefix
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, TREE, gated, members_of, perturbed
from tests.fusion.test_hosted import GROUPED, MAKERS, batch, scale_

PRUNED_TRUNK = [HeadMask([[1, 0, 1, 1], [0, 0, 0, 0], mask[2].tolist()]) for mask in LATE]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _esm() -> nn.Module:
    from transformers import EsmConfig, EsmForSequenceClassification

    sizes = {**zoo.SIZES, "vocab_size": 99, "pad_token_id": 0, "mask_token_id": 97}
    config = EsmConfig(**sizes, position_embedding_type="rotary", num_labels=5)
    return EsmForSequenceClassification(config)


def _modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    special = {"cls_token_id": 1, "sep_token_id": 98}
    config = ModernBertConfig(
        **zoo.SIZES, **zoo.TEXT, **special, layer_types=MIXED, local_attention=4, num_labels=5
    )
    return ModernBertForSequenceClassification(config)


def _gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForSequenceClassification

    config = Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=3, layer_types=MIXED, attn_logit_softcapping=2.0
    )
    return Gemma2ForSequenceClassification(config)


def _smollm3() -> nn.Module:
    from transformers import SmolLM3Config, SmolLM3ForSequenceClassification

    return SmolLM3ForSequenceClassification(SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1]))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForSequenceClassification

    return Phi3ForSequenceClassification(Phi3Config(**GROUPED))


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
        return timm.create_model(name, num_classes=5, **sizes, **options)

    return make


LEARNT: dict[str, Callable[[], nn.Module]] = {
    "beit": MAKERS["beit"],  # a table by relative position of each block, a bare layer scale
    "timm-beit": _timm("beit_base_patch16_224", init_values=0.1),  # bare biases of queries
    "eva02": MAKERS["eva02"],  # rotary positions in two dimensions, a gated MLP
    "dinov3": _timm("vit_small_patch16_dinov3"),
    "esm": _esm,  # queries are scaled before they are turned
    "modernbert": _modernbert,  # windows and angles by layer
    "gemma2": _gemma2,  # norms before and after, windows by layer, scores that are bent
    "gemma3": MAKERS["gemma3"],  # angles by layer, too
    "smollm3": _smollm3,  # blocks that do not look at the angles
    "phi3": _phi3,  # one linear for grouped queries, keys and values
}
KEEP_HEADS = ("timm-beit", "eva02", "dinov3", "phi3")
"""Hosts whose own code needs all heads."""


@cache
def host(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return scale_(LEARNT[name]().eval())


def inputs_of(name: str) -> Any:
    return batch({"timm-beit": "eva02", "dinov3": "eva02"}.get(name, name))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("masks", [LATE, EARLY, TREE, PRUNED_TRUNK])
@pytest.mark.parametrize("name", LEARNT)
def test_fused_members_equal_members_one_by_one_and_the_gated_host(name: str, masks: Any) -> None:
    model, inputs = host(name), inputs_of(name)
    ensemble = hydra.fuse(model, masks, engine="fused")
    assert ensemble.switches.get("keeps_heads", False) is (name in KEEP_HEADS)
    given = [inputs]
    if isinstance(inputs, dict) and "input_ids" in inputs:  # padding on the left, too
        given.append({key: value.flip(1) for key, value in inputs.items()})
    for one in given:
        expected = gated(model, masks, one)
        assert (expected[:, 0] - zoo.run(model, one)).abs().max() > 1e-3, "masks must matter"
        for mode in ("fused", "loop"):
            ensemble.mode = mode
            close(members_of(ensemble, one), expected)
    ensemble.mode = "fused"
    ensemble.untie_()
    close(members_of(ensemble, inputs), gated(model, masks, inputs))


@pytest.mark.parametrize("name", LEARNT)
def test_it_costs_less_than_the_hosts_own_blocks(name: str) -> None:
    model, inputs = host(name), inputs_of(name)
    ensemble = hydra.fuse(model, LATE)
    assert ensemble.engine == hydra.explain(model).engine == "fused"
    counted = cost(ensemble, inputs)
    hosted = cost(hydra.fuse(model, LATE, engine="host"), inputs)
    assert counted.multiply_adds < hosted.multiply_adds
    if name != "gemma2":  # attention by hand: the counter knows only the one of torch
        ran = multiply_adds(lambda: members_of(ensemble, inputs))
        assert counted.multiply_adds == pytest.approx(ran, rel=0.02)
    ratio = counted.relative_to(cost(model, inputs)).multiply_adds
    assert CostModel(model, inputs).ratio(LATE) == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("name", LEARNT)
def test_it_comes_back_from_its_folder_and_is_searched(name: str, tmp_path: Path) -> None:
    model, inputs = host(name), inputs_of(name)
    ensemble = hydra.fuse(model, PRUNED_TRUNK)
    given = model if isinstance(inputs, torch.Tensor) else None  # timm's names tell no sizes
    with nullcontext() if given is None else pytest.warns(UserWarning, match="host=model"):
        ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path, host=given)
    assert loaded.engine == "fused"
    close(members_of(loaded, inputs), members_of(ensemble, inputs))
    labels = torch.arange(len(members_of(loaded, inputs)))
    data = [{**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)]
    found = Prefix(host_model(model), {"id": data}).logits([*EARLY, *LATE]).logits["id"]
    expected = gated(model, [*EARLY, *LATE], inputs)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize("name", ["beit", "timm-beit", "dinov3", "gemma3"])
def test_finetuned_members_are_exact(name: str) -> None:
    members = [perturbed(host(name), seed, only=f"{_blocks(name)}.2.") for seed in range(3)]
    ensemble, inputs = hydra.fuse(members, LATE, engine="fused"), inputs_of(name)
    hydra.verify(ensemble, inputs, tolerance=1e-4)


def _blocks(name: str) -> str:
    return host_model(host(name)).blocks_path


def test_a_head_takes_its_column_of_the_table_with_it() -> None:
    model, mask = copy.deepcopy(host("beit")), LATE[0]
    expected = gated(model, [mask], inputs_of("beit"))[:, 0]
    hydra.prune_heads_(model, mask)
    tables = [layer.relative_position_bias for layer in model.beit.layers]
    assert [t.relative_position_bias_table.shape[1] for t in tables] == [4, 3, 2]
    close(zoo.run(model, inputs_of("beit")), expected)


def test_a_bias_that_the_host_does_not_have_is_not_learnt() -> None:
    ensemble = hydra.fuse(host("eva02"), LATE, engine="fused").untie_().train()
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    ensemble.member_logits(inputs_of("eva02")).square().sum().backward()
    optimizer.step()
    (block,) = ensemble.body.branch
    assert block.bank.bias.grad[0].abs().max() > 0
    assert block.bank.bias[1].abs().max() == 0
    hydra.verify(ensemble, inputs_of("eva02"), tolerance=1e-4)


def test_pictures_of_another_size_are_refused_and_the_host_engine_takes_them() -> None:
    model = host("beit")
    ensemble = hydra.fuse(model, LATE)
    wide = {"pixel_values": torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(3))}
    expected = gated(model, LATE, wide)  # as many tokens, in another shape
    with pytest.raises(UnsupportedModelError, match="another size"):
        members_of(ensemble, wide)
    large = {"pixel_values": torch.randn(2, 3, 24, 24)}
    with pytest.raises(UnsupportedModelError, match="37 tokens"):
        members_of(ensemble, large)
    hosted = hydra.fuse(model, LATE, engine="host")
    close(members_of(hosted, wide), expected)
