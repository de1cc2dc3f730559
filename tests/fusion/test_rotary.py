"""Rotary positions and grouped queries by our own arithmetic, read out at one token per sample."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs.formula import CostModel, cost
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.attention import read_rotary
from hydra_ensembles.search.trunk_cache import Prefix
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, TREE, gated, members_of, perturbed
from tests.fusion.test_hosted import GROUPED, batch, host, scale_

BROKEN = [HeadMask([[1, 0, 1, 1], [0, 0, 0, 1], row.tolist()]) for row in (m[2] for m in LATE)]
"""Groups of queries are {0, 1} and {2, 3}: the trunk keeps parts of them."""


@pytest.mark.parametrize("masks", [LATE, EARLY, TREE, BROKEN], ids=["late", "early", "tree", "cut"])
@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "halves"), ("qwen3", "halves"), ("pe", "pairs"), ("glm", "pairs of halves")],
)
def test_turned_members_equal_the_gated_host(name: str, form: str, masks: Any) -> None:
    model, inputs = host(name), batch(name)
    ensemble = hydra.fuse(model, masks)
    assert ensemble.switches["rotary"] == form
    for given in (inputs, _left(inputs)):
        expected = gated(model, masks, given)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(members_of(ensemble, given), expected, atol=2e-5 * scale, rtol=0)
        ensemble.mode = "loop"
        torch.testing.assert_close(members_of(ensemble, given), expected, atol=2e-5 * scale, rtol=0)
        ensemble.mode = "fused"
    for block in ensemble.body.branch:
        block.grouped = True  # as on a GPU
    torch.testing.assert_close(
        members_of(ensemble, inputs), gated(model, masks, inputs), atol=2e-5 * scale, rtol=0
    )


def _left(inputs: Any) -> Any:
    """Pad texts on the left."""
    if not isinstance(inputs, dict):
        return inputs
    return {key: value.flip(1) for key, value in inputs.items()}


def test_the_last_block_runs_for_the_last_real_tokens_only() -> None:
    readout = host_model(host("llama")).readout
    assert str(readout) == "the last real token of each sample"
    inputs = batch("llama")
    expected = inputs["attention_mask"].sum(1) - 1
    assert readout.positions is not None
    torch.testing.assert_close(readout.positions(inputs), expected)
    rows = []
    ensemble = hydra.fuse(host("llama"), LATE)
    (mlp,) = ensemble.body.branch[-1].mlp
    handle = mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    members_of(ensemble, inputs)
    handle.remove()
    assert sum(rows) == 3 * len(expected)


def test_it_comes_back_from_its_folder(tmp_path: Path) -> None:
    inputs = batch("llama")
    ensemble = hydra.fuse(host("llama"), BROKEN)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    assert type(loaded.body) is type(ensemble.body)
    torch.testing.assert_close(members_of(loaded, inputs), members_of(ensemble, inputs))


def test_finetuned_members_and_untied_ones_are_exact() -> None:
    members = [perturbed(host("llama"), seed, only="layers.2.self_attn") for seed in range(3)]
    ensemble, inputs = hydra.fuse(members, LATE), batch("llama")
    parts = [gated(m, [mask], inputs) for m, mask in zip(members, LATE, strict=True)]
    torch.testing.assert_close(members_of(ensemble, inputs), torch.cat(parts, 1), atol=1e-4, rtol=0)
    ensemble.untie_()
    torch.testing.assert_close(members_of(ensemble, inputs), torch.cat(parts, 1), atol=1e-4, rtol=0)


def test_cost_counts_what_runs_and_the_readout_makes_it_cheaper() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = host("llama"), batch("llama")
    ensemble = hydra.fuse(model, LATE)
    counter = FlopCounterMode(display=False)
    with counter:
        members_of(ensemble, inputs)
    counted = cost(ensemble, inputs)
    assert counted.multiply_adds == pytest.approx(counter.get_total_flops() // 2, rel=0.02)
    ratio = counted.relative_to(cost(model, inputs)).multiply_adds
    assert CostModel(model, inputs).ratio(LATE) == pytest.approx(ratio, rel=0.03)
    hosted = cost(hydra.fuse(model, LATE, engine="host"), inputs)
    assert counted.multiply_adds < hosted.multiply_adds


@pytest.mark.parametrize("window", [3, 20])
def test_windows_that_our_examples_do_not_reach_are_masked(window: int) -> None:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=window, layer_types=kinds
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = scale_(Qwen2ForSequenceClassification(config).eval())
    ensemble = hydra.fuse(model, LATE, engine="fused")
    assert ensemble.switches["by_layer"] is True
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = gated(model, LATE, inputs)
    wide = copy.deepcopy(model)
    wide.config.sliding_window = 100
    assert (gated(wide, LATE, inputs) - expected).abs().max() > 1e-2, "the window must matter"
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-4, rtol=0)


def test_windows_that_no_mask_tells_are_seen() -> None:
    from transformers import GPTNeoConfig, GPTNeoForSequenceClassification

    def reason(kinds: list[Any]) -> str | None:
        config = GPTNeoConfig(
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            vocab_size=99,
            attention_types=kinds,
            window_size=20,  # more than our examples have tokens
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 98},
        )
        family = hydra.Family(
            name="neo",
            query="attn.attention.q_proj",
            key="attn.attention.k_proj",
            value="attn.attention.v_proj",
            output="attn.attention.out_proj",
            norm1="ln_1",
            norm2="ln_2",
            returns_tuple=True,
        )
        return host_model(GPTNeoForSequenceClassification(config), family=family).why_not_fused()

    assert "windows in some of them" in str(reason([[["global", "local", "global"], 1]]))
    assert "windows in some of them" not in str(reason([[["global"], 3]]))


def test_a_search_turns_queries_and_keys() -> None:
    model, inputs = host("llama"), batch("llama")
    data = [{**inputs, "labels": torch.tensor([0, 1, 2, 3])}]
    found = Prefix(host_model(model), {"id": data}).logits([*EARLY, *LATE]).logits["id"]
    torch.testing.assert_close(found, gated(model, [*EARLY, *LATE], inputs), atol=1e-4, rtol=0)


def test_a_prompted_language_model_is_read_at_the_end_of_its_prompt() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**GROUPED, "num_labels": 2})
    model = LlamaForCausalLM(config).eval()
    classifier = hydra.PromptClassifier.from_parts(
        model, ["no", "yes"], "Is it {}?", [[5], [7]]
    ).eval()
    readout = host_model(classifier).readout
    assert readout.positions is not None
    inputs = zoo.batch("bert")
    ensemble = hydra.fuse(classifier, LATE)
    for given in (inputs, _left(inputs)):
        torch.testing.assert_close(
            members_of(ensemble, given), gated(classifier, LATE, given), atol=1e-5, rtol=1e-5
        )


def test_angles_of_an_unknown_shape_are_refused() -> None:
    cos = torch.ones(2, 4, 5, 8)
    assert read_rotary((cos, cos), "halves", 5) is None  # by head
    assert read_rotary(torch.ones(5, 8, dtype=torch.complex64), "pairs", 5) is None
    assert read_rotary((cos[0, 0], cos[0, 0]), "halves", 4) is None  # more angles than tokens
    prefix = read_rotary((0 * cos[0, 0], cos[0, 0]), "halves", 6)  # a class token is not turned
    assert prefix is not None
    x = torch.randn(2, 3, 6, 8)
    torch.testing.assert_close(prefix.turn(x)[:, :, 0], x[:, :, 0])
    assert (prefix.turn(x)[:, :, 1:] - x[:, :, 1:]).abs().max() > 0.1
