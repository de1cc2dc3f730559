"""The host engine: members by the host's own blocks equal the gated host, whatever they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from hydra_ensembles.fusion.host_engine import HostedBlock
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.head_removal import Cut, best_cut
from hydra_ensembles.hosts.operation_count import multiply_adds
from hydra_ensembles.search.trunk_cache import Prefix
from tests import zoo
from tests.fusion.test_fusion import EARLY, EQUAL, LATE, TREE, gated, members_of, perturbed

EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
GROUPED = {**zoo.SIZES, **zoo.TEXT, "num_labels": 5, "num_key_value_heads": 2}
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**GROUPED))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    return Qwen3ForSequenceClassification(Qwen3Config(**GROUPED, head_dim=8))


def _glm() -> nn.Module:
    from transformers import GlmConfig, GlmForSequenceClassification

    return GlmForSequenceClassification(GlmConfig(**GROUPED, head_dim=8))


def _gemma3() -> nn.Module:
    from transformers import Gemma3TextConfig, Gemma3TextForSequenceClassification

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=3, layer_types=kinds)
    return Gemma3TextForSequenceClassification(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForSequenceClassification

    return MixtralForSequenceClassification(MixtralConfig(**GROUPED, num_local_experts=3))


def _gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForSequenceClassification

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = GptOssConfig(**GROUPED, head_dim=8, sliding_window=3, layer_types=kinds, **EXPERTS)
    return GptOssForSequenceClassification(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, **zoo.TEXT, num_labels=5)
    return GPT2ForSequenceClassification(config)


def _beit() -> nn.Module:
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(**zoo.SIZES, **zoo.IMAGE, num_labels=5, use_relative_position_bias=True)
    return BeitForImageClassification(config)


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=5, **TIMM)

    return make


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,  # rotary positions, grouped queries, gated MLP, last real token
    "qwen3": _qwen3,  # norms of queries and keys
    "glm": _glm,  # half of each head is turned, neighbours together
    "gemma3": _gemma3,  # windows by layer, two sets of rotary positions
    "mixtral": _mixtral,  # a mixture of experts
    "gpt_oss": _gpt_oss,  # experts, windows by layer, sinks of attention
    "gpt2": _gpt2,  # learnt positions, causal
    "beit": _beit,  # a bias by relative position and head
    "eva02": _timm("eva02_tiny_patch14_224"),
    "pe": _timm("vit_pe_core_tiny_patch16_384"),  # rotary positions
    "srelpos": _timm("vit_srelpos_small_patch16_224"),  # a bias shared by all blocks
}


@cache
def host(name: str) -> nn.Module:
    """Return a shared tiny model, its weights large enough for positions and biases to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return scale_(MAKERS[name]().eval())


def scale_(model: nn.Module) -> nn.Module:
    """Redraw the weights, large enough for every part to matter, in place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                table = any(part in path for part in ("embed", "wte", "wpe", "bias_table"))
                parameter.copy_(noise if table else noise * 1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" not in path:
                parameter.copy_(0.5 * noise + ("ls" in path or "gamma" in path))
    return model


def batch(name: str) -> Any:
    """Return images, or texts that are padded with the padding token."""
    if name in ("beit", "eva02", "pe", "srelpos"):
        size = 16 if name == "beit" else 32
        images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": images} if name == "beit" else images
    inputs = zoo.batch("bert")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    return inputs


@pytest.mark.parametrize("masks", [LATE, EARLY], ids=["late", "early"])
@pytest.mark.parametrize("name", MAKERS)
def test_members_by_the_hosts_own_blocks_equal_the_gated_host(
    name: str, masks: list[HeadMask]
) -> None:
    model, inputs = host(name), batch(name)
    expected = gated(model, masks, inputs)
    assert (expected[:, 0] - zoo.run(model, inputs)).abs().max() > 1e-3, "masks must matter"
    ensemble = hydra.fuse(model, masks, engine="host")
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5 * scale, rtol=0)
    if isinstance(inputs, dict) and "input_ids" in inputs:  # padding on the left
        inputs = {key: value.flip(1) for key, value in inputs.items()}
        expected = gated(model, masks, inputs)
        actual = members_of(ensemble, inputs)
        torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", zoo.MAKERS)
def test_every_host_runs_by_both_engines(name: str) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    for masks in (EARLY, TREE, EQUAL):
        expected = gated(model, masks, inputs)
        for engine in ("host", "auto"):
            ensemble = hydra.fuse(model, masks, engine=engine)
            torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)
    apart = hydra.fuse(model, EARLY, engine="host", share_trunk=False, mode="loop")
    expected = gated(model, EARLY, inputs)
    torch.testing.assert_close(members_of(apart, inputs), expected, atol=1e-5, rtol=0)
    apart.mode = "fused"
    torch.testing.assert_close(members_of(apart, inputs), expected, atol=1e-5, rtol=0)


def test_heads_are_removed_where_the_code_allows_it_and_gated_off_where_not() -> None:
    pruned = hydra.fuse(zoo.host("vit"), LATE, engine="host").body.branch[-1]
    widths = [block.attention.o_proj.in_features for block in pruned.streams]
    assert widths == [2 * 8, 2 * 8, 1 * 8]
    shared = hydra.fuse(host("srelpos"), LATE, engine="host").body.branch[-1]
    assert [block.attn.proj.in_features for block in shared.streams] == [32, 32, 32]
    groups = hydra.fuse(host("llama"), LATE, engine="host").body.branch[-1]
    assert [b.self_attn.o_proj.in_features for b in groups.streams] == [16, 32, 16]
    assert [b.self_attn.k_proj.out_features for b in groups.streams] == [8, 16, 8]


@pytest.mark.parametrize("name", ["llama", "srelpos", "pe"])
def test_every_distinct_tensor_is_saved_once_and_comes_back(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ensemble, inputs = hydra.fuse(host(name), EARLY, engine="host"), batch(name)
    for folder, change in (("shared", None), ("untied", False), ("own MLPs", True)):
        if change is not None:
            ensemble.untie_(mlps=change)
            with torch.no_grad():  # members differ by more than their heads now
                for parameter in ensemble.body.branch[-1].streams[1].parameters():
                    parameter += 0.05
        given = None if name == "llama" else host(name)
        known = nullcontext() if given is None else pytest.warns(UserWarning, match="host=model")
        with known:  # timm's name does not tell the tiny sizes
            ensemble.save_pretrained(tmp_path / folder)
        loaded = hydra.HydraEnsemble.from_pretrained(tmp_path / folder, host=given)
        torch.testing.assert_close(members_of(loaded, inputs), members_of(ensemble, inputs))
        stored = sum(t.numel() for t in load_file(tmp_path / folder / "model.safetensors").values())
        buffers = sum(b.numel() for b in ensemble.host.state_dict().values()) - sum(
            p.numel() for p in ensemble.host.state_dict(keep_vars=True).values() if p.requires_grad
        )
        assert stored <= sum(p.numel() for p in ensemble.parameters()) + buffers
        assert sum(p.numel() for p in loaded.parameters()) == sum(
            p.numel() for p in ensemble.parameters()
        )


def test_a_layer_without_heads_answers_in_the_form_of_its_attention() -> None:
    """Two samples must not pass for the pair that the attention of a block returns."""
    from hydra_ensembles.hosts import families

    family = replace(families["llama"], name="mine", returns_tuple=False)  # not true
    view = host_model(host("llama"), family=family)
    call = view.passes()[-1][1]
    assert len(call.hidden) == 2
    assert best_cut(view.blocks[1], [], call) == Cut((0, 1, 2, 3), ())
    assert best_cut(host_model(host("llama")).blocks[1], [], call) == Cut((), ())


def test_members_come_out_as_plain_hosts() -> None:
    ensemble, inputs = hydra.fuse(host("llama"), EARLY, engine="host"), batch("llama")
    expected = gated(host("llama"), EARLY, inputs)
    for member in range(3):
        plain = ensemble.member(member)
        assert not any(isinstance(module, HostedBlock) for module in plain.modules())
        torch.testing.assert_close(zoo.run(plain, inputs), expected[:, member])
    hydra.verify(ensemble, inputs)
    assert hydra.explain(host("gpt_oss")).engine == "host"


def test_untied_members_train_apart() -> None:
    ensemble = hydra.fuse(host("llama"), LATE, engine="host").untie_().freeze_trunk_().train()
    inputs = batch("llama")
    before = {name: p.detach().clone() for name, p in ensemble.named_parameters()}
    optimizer = torch.optim.SGD([p for p in ensemble.parameters() if p.requires_grad], lr=0.1)
    ensemble(**inputs, labels=torch.tensor([0, 1, 2, 3])).loss.backward()
    optimizer.step()
    moved = {n for n, p in ensemble.named_parameters() if not torch.equal(p, before[n])}
    last = "host.model.layers.2.streams"
    assert {f"{last}.{m}.self_attn.o_proj.weight" for m in range(3)} <= moved
    assert not any(name.startswith("host.model.layers.0") for name in moved)
    names = dict(ensemble.named_parameters(remove_duplicate=False))
    assert names[f"{last}.0.mlp.up_proj.weight"] is names[f"{last}.1.mlp.up_proj.weight"]


def test_finetuned_members_share_what_is_equal() -> None:
    members = [perturbed(host("llama"), seed, only="layers.2.self_attn") for seed in range(3)]
    ensemble, inputs = hydra.fuse(members, LATE, engine="host"), batch("llama")
    expected = torch.cat(
        [gated(m, [mask], inputs) for m, mask in zip(members, LATE, strict=True)], 1
    )
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-4, rtol=0)
    assert ensemble.plan.trunk == 2
    norms = [block.input_layernorm.weight for block in ensemble.body.branch[0].streams]
    assert norms[0] is norms[1] is norms[2]


@pytest.mark.parametrize("name", ["gpt_oss", "llama", "vit"])
def test_cost_counts_what_runs(name: str) -> None:
    model = zoo.host(name) if name == "vit" else host(name)
    inputs = zoo.batch(name) if name == "vit" else batch(name)
    ensemble = hydra.fuse(model, LATE, engine="host")
    ran = multiply_adds(lambda: members_of(ensemble, inputs))
    assert cost(ensemble, inputs).multiply_adds == ran
    ratio = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
    assert ratio > 1
    if name == "gpt_oss":  # whose own engine this is
        assert CostModel(model, inputs).ratio(LATE) == pytest.approx(ratio, rel=0.02)


def test_a_search_runs_the_hosts_own_blocks_with_their_own_arguments() -> None:
    model, inputs = host("gpt_oss"), batch("gpt_oss")
    data = [{**inputs, "labels": torch.tensor([0, 1, 2, 3])}]
    prefix = Prefix(host_model(model), {"id": data})
    found = prefix.logits([*EARLY, *LATE]).logits["id"]
    torch.testing.assert_close(found, gated(model, [*EARLY, *LATE], inputs), atol=1e-4, rtol=0)


def test_layers_that_share_weights_are_refused_with_a_reason() -> None:
    shared = copy.deepcopy(host("llama"))
    shared.model.layers = nn.ModuleList([shared.model.layers[0]] * 3)
    with pytest.raises(UnsupportedModelError, match="3 times in one pass"):
        hydra.fuse(shared, LATE)
    assert not hydra.explain(shared).fusable
