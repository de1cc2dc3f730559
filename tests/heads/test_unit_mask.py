"""Masks of heads and neurons: sets, files, gates and removal, on every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.errors import FormatError, MaskError, UnsupportedModelError
from hydra_ensembles.heads import HeadMask, UnitMask, gate, prune_units_
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.architecture import describe_host, rebuild_host
from tests import zoo
from tests.hosts.test_shared_layers import albert

A = UnitMask([[1, 0], [1, 1]], [[1, 0, 0], [1, 1, 0]])
B = UnitMask([[1, 1], [0, 1]], [[1, 1, 0], []])


def test_masks_are_sets() -> None:
    assert UnitMask([[1, 0], [0, 1]], [[1, 0, 0], [1, 1, 0]]) == A & B
    assert UnitMask([[1, 1], [1, 1]], [[1, 1, 0], [1, 1, 1]]) == A | B
    assert UnitMask([[0, 1], [1, 0]], [[0, 1, 0], [0, 0, 1]]) == A ^ B
    assert UnitMask([[0, 0], [1, 0]], [[0, 0, 0], [0, 0, 0]]) == A - B
    assert UnitMask([[0, 1], [0, 0]], [[0, 1, 1], [0, 0, 1]]) == ~A
    assert A & B <= A <= A | B
    assert not A <= B
    assert len({A, copy.deepcopy(A), B}) == 2
    assert A.total_kept == 3 + 3


def test_a_mask_of_heads_keeps_all_neurons() -> None:
    heads = HeadMask([[1, 1], [0, 1]])
    assert A & heads == heads & A == UnitMask([[1, 0], [0, 1]], A.neurons)
    assert heads - A == UnitMask([[0, 1], [0, 0]], (~A).neurons)
    assert UnitMask.of(heads) == UnitMask(heads) == UnitMask(heads, [[], []])
    with pytest.raises(TypeError):
        A & 3  # type: ignore[operator]


def test_masks_are_written_and_read(tmp_path: Path) -> None:
    for mask in (A, B):
        assert UnitMask.from_json(mask.to_json()) == mask
        mask.to_json(tmp_path / "mask.json")
        assert UnitMask.from_json(tmp_path / "mask.json") == mask
        mask.to_safetensors(tmp_path / "mask.safetensors")
        assert UnitMask.from_safetensors(tmp_path / "mask.safetensors") == mask
        assert UnitMask(**mask.tolist()) == mask
    with pytest.raises(MaskError):
        UnitMask.from_json(HeadMask([[1, 0]]).to_json())
    assert repr(A) == "<UnitMask: 3 of 4 heads, 3 of 6 neurons kept>"
    assert str(B).splitlines()[1:] == ["  0  heads 2/2  neurons 2/3", "  1  heads 1/2  all neurons"]


def test_wrong_masks_say_what_is_wrong() -> None:
    model = zoo.host("bert")
    with pytest.raises(MaskError, match="heads of 2 layers has neurons of 1"):
        UnitMask([[1], [1]], [[1]])
    with pytest.raises(MaskError, match="NeuronMask holds"):
        UnitMask([[1]], [[2]])
    wrong = UnitMask(HeadMask.full(model), [[1, 0]] * zoo.LAYERS)
    with (
        pytest.raises(MaskError, match="2 neurons in layer 0 but"),
        gate(model, wrong),
    ):
        pass
    silent = UnitMask(HeadMask.full(model), [[0] * 48] * zoo.LAYERS)
    with pytest.raises(MaskError, match="No neuron of layer 0 is kept"):
        prune_units_(model, silent)


@pytest.mark.parametrize("name", zoo.MAKERS)
def test_gated_units_equal_removed_ones(name: str) -> None:
    model = zoo.make(name)
    batch = zoo.batch(name)
    whole = zoo.run(model, batch)
    heads = HeadMask([torch.arange(n) < n // 2 for n in host_model(model).head_counts])  # groups
    mask = UnitMask(heads, UnitMask.random(model, keep=0.6, seed=3).neurons)
    with gate(model, mask):
        gated = zoo.run(model, batch)
    with gate(model, UnitMask(mask.heads)):
        without_neurons = zoo.run(model, batch)
    assert float((gated - without_neurons).abs().max()) > 1e-2
    assert torch.equal(zoo.run(model, batch), whole)
    assert prune_units_(model, mask) is model
    torch.testing.assert_close(zoo.run(model, batch), gated, atol=1e-5, rtol=1e-5)
    assert host_model(model).neuron_counts == mask.neurons.kept


@pytest.mark.parametrize("name", zoo.FUSABLE)
def test_a_host_with_fewer_neurons_is_fused_counted_saved_and_loaded(
    name: str, tmp_path: Path
) -> None:
    model, batch = zoo.make(name), zoo.batch(name)
    neurons = [
        torch.arange(n) < n // (2 + i) for i, n in enumerate(host_model(model).neuron_counts)
    ]
    whole = hydra.cost(model, batch)
    prune_units_(model, UnitMask(HeadMask.full(model), neurons))
    assert hydra.cost(model, batch).relative_to(whole).multiply_adds < 0.9
    rebuilt = rebuild_host(describe_host(model)).state_dict()
    assert [value.shape for value in rebuilt.values()] == [
        value.shape for value in model.state_dict().values()
    ]
    masks = [HeadMask.random(model, keep=0.5, seed=seed) for seed in range(2)]
    ensemble = hydra.fuse(model, masks)
    expected = ensemble.fused_logits(*zoo_inputs(batch))
    with gate(model, masks[1]):
        torch.testing.assert_close(expected[:, 1], zoo.run(model, batch), atol=1e-4, rtol=1e-4)
    assert hydra.cost(ensemble.unpruned_host(), batch).multiply_adds == whole.multiply_adds
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.fused_logits(*zoo_inputs(batch)), expected)
    loaded.save_pretrained(tmp_path / "again")
    again = hydra.HydraEnsemble.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again.fused_logits(*zoo_inputs(batch)), expected)


def zoo_inputs(batch: Any) -> Any:
    return ((), batch) if isinstance(batch, dict) else ((batch,), {})


def test_neurons_go_in_several_steps() -> None:
    model, batch = zoo.make("timm"), zoo.batch("timm")
    once = copy.deepcopy(model)
    full = HeadMask.full(model)
    for count in (100, 60):
        rows = [torch.arange(n) < count for n in host_model(model).neuron_counts]
        prune_units_(model, UnitMask(full, rows))
    prune_units_(once, UnitMask(full, [torch.arange(128) < 60] * zoo.LAYERS))
    assert torch.equal(zoo.run(model, batch), zoo.run(once, batch))
    assert describe_host(model) == describe_host(once)
    assert {record["neurons"] for record in describe_host(model)["neurons"]} == {128}
    assert describe_host(model)["arguments"]["mlp_ratio"] == 4.0


def test_a_description_that_does_not_fit_is_refused() -> None:
    model = zoo.make("vit")
    prune_units_(model, UnitMask(HeadMask.full(model), [[1] * 8 + [0] * 40] * zoo.LAYERS))
    description = describe_host(model)
    changes = ({"neurons": 50}, {"second": "vit.no"}, {"packed": 2}, {"first": 3}, {"kept": "a"})
    for change in changes:
        wrong = [{**description["neurons"][0], **change}]
        with pytest.raises(FormatError, match="does not have the neurons"):
            rebuild_host({**description, "neurons": wrong})


def test_layers_that_share_weights_can_be_gated_but_not_pruned() -> None:
    model = albert()
    ids = torch.arange(1, 13).view(2, 6)
    host = host_model(model)
    rows = [torch.arange(n) % (2 + i) == 0 for i, n in enumerate(host.neuron_counts)]
    mask = UnitMask(HeadMask.full(host), rows)
    with gate(model, mask):
        ours = zoo.run(model, {"input_ids": ids})
    with gate(host, mask):  # a twin with one block per call
        theirs = zoo.run(host.model, {"input_ids": ids})
    torch.testing.assert_close(ours, theirs)
    assert float((ours - zoo.run(model, {"input_ids": ids})).abs().max()) > 1e-4
    with pytest.raises(UnsupportedModelError, match="share one set of weights"):
        prune_units_(model, mask)


def test_gates_of_each_sample_carry_gradients() -> None:
    model, batch = zoo.make("vit"), zoo.batch("vit", size=3)
    gates = [torch.ones(3, 48, requires_grad=True) for _ in range(zoo.LAYERS)]
    with torch.enable_grad(), gate(model, [None] * zoo.LAYERS, gates):
        loss = model(batch).logits.square().sum(1)
        gradients = torch.autograd.grad(loss.sum(), gates)
    for sample in range(3):
        ones = [torch.ones(48, requires_grad=True) for _ in range(zoo.LAYERS)]
        with torch.enable_grad(), gate(model, [None] * zoo.LAYERS, ones):
            loss = model(batch[sample : sample + 1]).logits.square().sum()
        for row, expected in zip(gradients, torch.autograd.grad(loss, ones), strict=True):
            torch.testing.assert_close(row[sample], expected, atol=1e-4, rtol=1e-3)


def test_members_with_different_neurons_are_refused() -> None:
    members = [zoo.make("bert"), zoo.make("bert")]
    prune_units_(members[1], UnitMask(HeadMask.full(members[1]), [[], [1] * 20 + [0] * 28, []]))
    with pytest.raises(UnsupportedModelError, match="different numbers of neurons in layer 1"):
        hydra.fuse(members, [HeadMask.full(member) for member in members])


def test_explain_counts_neurons_and_says_why_they_stay() -> None:
    from timm.models import Eva
    from transformers import MixtralConfig, MixtralForSequenceClassification

    model = zoo.make("bert")
    assert "  neurons   3 x 48 (layers x neurons)" in str(hydra.explain(model)).splitlines()
    prune_units_(model, UnitMask(HeadMask.full(model), [[], [1] * 20 + [0] * 28, []]))
    told = hydra.explain(model)
    assert told.neuron_counts == (48, 20, 48)
    assert "already pruned: 20 of 48 neurons are left in 1 MLPs" in told.notes
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    norms = zoo.seeded(lambda: Eva(**sizes, swiglu_mlp=True, scale_mlp=True, num_classes=3))
    why = "stay: its MLP has neurons that depend on each other (mlp.norm)"
    assert f"  neurons   {why}" in str(hydra.explain(norms))
    config = MixtralConfig(**zoo.SIZES, **zoo.TEXT, num_key_value_heads=2, num_local_experts=2)
    experts = zoo.seeded(lambda: MixtralForSequenceClassification(config))
    assert "  neurons   stay: its MLP is a mixture of experts" in str(hydra.explain(experts))


def t5() -> Any:
    from transformers import T5Config, T5ForTokenClassification

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForTokenClassification(T5Config(**sizes, vocab_size=99, num_labels=5))


def bloom() -> Any:
    from transformers import BloomConfig, BloomForSequenceClassification

    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99, pad_token_id=0)
    return BloomForSequenceClassification(config)


@pytest.mark.parametrize("make", [t5, bloom])
def test_an_mlp_that_only_its_block_can_run_is_found(make: Any, tmp_path: Path) -> None:
    model = zoo.seeded(make)
    ids = {"input_ids": torch.arange(3, 15).view(2, 6)}
    mask = UnitMask(HeadMask.full(model), UnitMask.random(model, keep=0.5).neurons)
    assert 0 < mask.neurons.total_kept < sum(mask.neurons.shape)
    whole = zoo.run(model, ids)
    with gate(model, mask):
        gated = zoo.run(model, ids)
    pruned = prune_units_(model, mask)
    torch.testing.assert_close(zoo.run(pruned, ids), gated, atol=1e-5, rtol=1e-5)
    assert float((gated - whole).abs().max()) > 1e-3
    heads = [HeadMask.random(model, keep=0.5, seed=seed) for seed in range(2)]
    ensemble = hydra.fuse(model, heads, batch=ids)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    expected = ensemble.fused_logits((), ids)
    torch.testing.assert_close(loaded.fused_logits((), ids), expected)
