"""`fold`: members follow their hosts, the fused model is exact, other hosts are refused."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles.errors import DataError, HydraError, UnsupportedModelError
from hydra_ensembles.hosts.block import last_linear
from hydra_ensembles.hosts.host import host_model
from hydra_ensembles.training import average_weights
from tests import zoo

FAMILIES = ["bert", "vit", "timm", "deit-teacher", "distilbert"]
LAST = {  # where members part
    "bert": "bert.encoder.layer.2.output.dense",
    "vit": "vit.layers.2.mlp.fc2",
    "timm": "blocks.2.mlp.fc2",
}


def perturbed(model: nn.Module, seed: int, size: float = 0.1) -> nn.Module:
    """Return a copy with noise on every weight: a fine-tuning of the same start."""
    generator = torch.Generator().manual_seed(seed)
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise * (parameter.std() if parameter.numel() > 1 else 1))
    return result


@cache
def trio(name: str) -> tuple[nn.Module, ...]:
    start = zoo.make(name)
    return tuple(perturbed(start, seed) for seed in range(3))


@cache
def data(name: str, count: int = 400) -> list[Any]:
    return [zoo.batch(name, 40, seed=seed) for seed in range(count // 40)]


@cache
def folded(name: str) -> hydra.HydraEnsemble:
    return hydra.fold(trio(name), data(name), progress=False)


def answers(models: Any, batch: Any) -> Tensor:
    return torch.stack([zoo.run(model, batch) for model in models], 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fused_model_is_its_members_and_they_follow_their_hosts(name: str) -> None:
    ensemble, batch = folded(name), zoo.batch(name, 64, seed=99)
    hydra.verify(ensemble, batch)
    hosts, soup = trio(name), average_weights(trio(name))
    ours, theirs = ensemble.predict(batch).member_logits, answers(hosts, batch)
    alone = answers([soup], batch)
    assert float((ours - theirs).square().mean()) < 0.8 * float((alone - theirs).square().mean())
    errors = ensemble.record["members"]
    assert all(e["error"] < e["error of the host's own layer"] for e in errors)
    assert len({tuple(m.flatten().tolist()) for m in ours.unbind(1)}) == 3
    assert ensemble.plan.trunk == len(ensemble.masks[0]) - 1


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
def test_a_member_is_a_host_with_the_mean_trunk_and_its_own_last_layer(name: str) -> None:
    ensemble, batch = folded(name), zoo.batch(name, 8, seed=99)
    for number, host in enumerate(trio(name)):
        by_hand = average_weights(trio(name))
        member = ensemble.member(number)
        assert type(member) is type(host)
        layer, fitted = by_hand.get_submodule(LAST[name]), member.get_submodule(LAST[name])
        assert not layer.weight.equal(fitted.weight)
        layer.load_state_dict(fitted.state_dict())
        after = {"bert": ["bert.pooler", "classifier"], "vit": ["vit.layernorm", "classifier"]}
        norms = {"bert": ["bert.encoder.layer.2.output.LayerNorm"]}
        for path in [*after.get(name, ["norm", "head"]), *norms.get(name, [])]:
            by_hand.get_submodule(path).load_state_dict(host.get_submodule(path).state_dict())
        torch.testing.assert_close(zoo.run(member, batch), zoo.run(by_hand, batch))


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
def test_saved_is_loaded_and_every_distinct_weight_is_saved_once(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    ensemble, batch = folded(name), zoo.batch(name, 8, seed=99)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.member_logits(batch).equal(ensemble.member_logits(batch))
    assert loaded.record["made_by"] == "fold" and "folded   from 3 hosts" in str(loaded)
    hydra.verify(loaded, batch)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    one = sum(p.numel() for p in trio(name)[0].parameters())
    last = trio(name)[0].get_submodule(LAST[name])
    own = sum(p.numel() for p in last.parameters())
    assert 2 * own < stored - one < 2 * own + 0.1 * one  # norms and classifiers besides


def test_predict_novelty_and_policy_work(tmp_path: Path) -> None:
    ensemble = hydra.fold(trio("vit"), data("vit"), progress=False)
    known = [(batch, zoo.run(trio("vit")[0], batch).argmax(-1)) for batch in data("vit")]
    ensemble.fit_novelty_(known, progress=False)
    more = [zoo.batch("vit", 40, seed=seed) for seed in range(50, 60)]
    labelled = [(batch, zoo.run(trio("vit")[0], batch).argmax(-1)) for batch in more]
    hydra.fit_policy(ensemble, labelled, risk=0.2, alarm=0.1, progress=False)
    answer = ensemble.predict(known[0][0])
    assert answer.abstain is not None
    assert answer.novelty is not None and answer.member_logits.shape == (40, 3, 5)
    ensemble.save_pretrained(tmp_path)
    again = hydra.HydraEnsemble.from_pretrained(tmp_path).predict(known[0][0])
    assert again.novelty is not None and again.novelty.equal(answer.novelty)
    assert again.abstain is not None and again.abstain.equal(answer.abstain)


@pytest.mark.parametrize("name", ["bert", "timm"])
def test_the_onnx_export_agrees(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from hydra_ensembles.runtime import load as load_exported

    ensemble = folded(name)
    batch = zoo.batch(name, 3, seed=99)
    ensemble.export(tmp_path, example=batch)
    inputs = batch if isinstance(batch, dict) else {"pixel_values": batch}
    answer = load_exported(tmp_path).predict({k: v.numpy() for k, v in inputs.items()})
    expected = ensemble.predict(batch).probabilities
    torch.testing.assert_close(torch.as_tensor(answer.probabilities), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
def test_identical_hosts_fold_into_themselves(name: str) -> None:
    host = zoo.make(name)
    ensemble = hydra.fold([host, copy.deepcopy(host)], data(name), progress=False)
    batch = zoo.batch(name, 8, seed=99)
    expected = zoo.run(host, batch)
    for logits in ensemble.member_logits(batch).unbind(1):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_labels_are_ignored_and_batches_do_not_matter() -> None:
    batch = zoo.batch("vit", 8, seed=99)
    expected = folded("vit").member_logits(batch)
    labelled = [(inputs, torch.full((40,), 77)) for inputs in data("vit")]
    other = hydra.fold(trio("vit"), labelled, progress=False).member_logits(batch)
    assert other.equal(expected)
    large = [torch.cat(data("vit")).split(150)[i] for i in range(3)]
    other = hydra.fold(trio("vit"), large, progress=False).member_logits(batch)
    torch.testing.assert_close(other, expected, atol=1e-4, rtol=1e-4)


def test_hosts_are_not_changed() -> None:
    hosts = [copy.deepcopy(host).train() for host in trio("bert")]
    before = [copy.deepcopy(host.state_dict()) for host in hosts]
    hydra.fold(hosts, data("bert"), progress=False)
    for host, state in zip(hosts, before, strict=True):
        assert host.training
        assert not host.bert.encoder.layer[-1].output.dense._forward_hooks  # type: ignore[union-attr]
        assert all(tensor.equal(state[name]) for name, tensor in host.state_dict().items())


def test_a_layer_scale_is_part_of_the_fit() -> None:
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    start = VisionTransformer(**shape, num_classes=5, init_values=0.3).eval()  # type: ignore[arg-type]
    ensemble = hydra.fold([perturbed(start, s) for s in range(2)], data("timm"), progress=False)
    hydra.verify(ensemble, zoo.batch("timm", 8))
    errors = ensemble.record["members"]
    assert all(0 < e["error"] < e["error of the host's own layer"] for e in errors)


def test_one_host_can_be_the_trunk() -> None:
    ensemble = hydra.fold(trio("bert"), data("bert"), trunk=1, progress=False)
    batch = zoo.batch("bert", 8, seed=99)
    hydra.verify(ensemble, batch)
    ours, theirs = ensemble.member_logits(batch)[:, 1], zoo.run(trio("bert")[1], batch)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert ensemble.record["trunk"] == 1 and "Members 1 keep" in ensemble.record["notes"][0]
    with pytest.raises(HydraError, match="trunk=3"):
        hydra.fold(trio("bert"), data("bert"), trunk=3, progress=False)


def test_hosts_without_a_common_start_are_warned_of() -> None:
    strangers = [perturbed(zoo.make("vit"), seed, size=3.0) for seed in range(2)]
    with pytest.warns(UserWarning, match="trunk=0"):
        hydra.fold(strangers, data("vit"), progress=False)
    assert hydra.fold(strangers, data("vit"), trunk="auto", progress=False).record["trunk"] == 0


def test_held_out_data_fits_one_temperature(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    generator = torch.Generator().manual_seed(0)
    labelled = [(b, torch.randint(0, 5, (40,), generator=generator)) for b in data("vit")]
    ensemble = hydra.fold(trio("vit"), data("vit"), held_out=labelled)
    assert ensemble.temperature is not None and ensemble.temperature > 1
    assert ensemble.record["calibration"]["examples"] == 400
    assert "calibrated" not in caplog.text
    assert hydra.fold(trio("vit"), data("vit")).temperature is None
    assert "Nothing was calibrated" in caplog.text


def test_few_examples_shrink_to_the_hosts_own_layers() -> None:
    ensemble = hydra.fold(trio("timm"), data("timm", 80), progress=False)  # 128 neurons
    assert "fewer examples than neurons" in ensemble.record["notes"][0]
    with pytest.raises(DataError, match="too few"):
        hydra.fold(trio("timm"), [zoo.batch("timm", 10)], progress=False)
    with pytest.raises(DataError, match="no batches"):
        hydra.fold(trio("timm"), [], progress=False)


def test_nan_is_refused() -> None:
    bad = [batch.clone() for batch in data("vit")]
    bad[3][7, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="batch 3"):
        hydra.fold(trio("vit"), bad, progress=False)
    broken = copy.deepcopy(trio("vit")[0])
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(torch.nan)
    with pytest.raises(DataError, match="Host 0 has NaN or infinity in"):
        hydra.fold([broken, broken], data("vit"), trunk=0, progress=False)


def test_hosts_that_differ_are_refused() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    def bert(**options: Any) -> nn.Module:
        given = {**zoo.SIZES, **zoo.TEXT, "num_labels": 5, **options}
        return BertForSequenceClassification(BertConfig(**given)).eval()

    first, batches = bert(), data("bert")
    for other, words in [
        (bert(num_labels=4), "4 classes"),
        (bert(intermediate_size=40), "architecture"),
        (zoo.make("roberta"), "architecture"),
    ]:
        with pytest.raises(UnsupportedModelError, match=words):
            hydra.fold([first, other], batches, progress=False)
    named = [bert(id2label=dict(enumerate(names))) for names in ("abcde", "abced")]
    with pytest.raises(UnsupportedModelError, match="class order"):
        hydra.fold(named, batches, progress=False)
    for alone in ([first], first):
        with pytest.raises(UnsupportedModelError, match="two or more"):
            hydra.fold(alone, batches, progress=False)
    with pytest.raises(UnsupportedModelError, match="HydraEnsemble"):
        hydra.fold([first, folded("bert")], batches, progress=False)


def test_hosts_whose_last_mlp_is_not_understood_are_refused() -> None:
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    for path, part, words in [
        ("blocks.1.ls2", nn.LayerNorm(32), "something other than a scale follows the MLP"),
        ("blocks.1.mlp.drop2", nn.Tanh(), "does not end with a linear layer"),
    ]:
        host = VisionTransformer(**shape, num_classes=5)  # type: ignore[arg-type]
        host.set_submodule(path, part)
        with pytest.raises(UnsupportedModelError, match=words):
            hydra.fold([host.eval(), copy.deepcopy(host).eval()], data("timm"), progress=False)


def test_hosts_that_take_the_maximum_over_tokens_fold_by_states() -> None:
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    host = VisionTransformer(**shape, num_classes=5, global_pool="max").eval()  # type: ignore[arg-type]
    batches = data("timm")
    ensemble = hydra.fold([host, copy.deepcopy(host)], batches, max_cost=2.0, progress=False)
    hydra.verify(ensemble, batches[0])


def test_lora_adapters_are_merged() -> None:
    peft = pytest.importorskip("peft")

    def tuned(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
        return peft.get_peft_model(zoo.make("bert"), config).eval()

    hosts = [tuned(0), tuned(1)]
    ensemble = hydra.fold(hosts, data("bert"), progress=False)
    hydra.verify(ensemble, zoo.batch("bert", 8))
    assert not any(hasattr(m, "base_layer") for m in ensemble.modules())
    assert any(hasattr(m, "base_layer") for m in hosts[0].modules())
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        hydra.fold([host.base_model.model for host in hosts], data("bert"), progress=False)


def test_the_cost_is_about_that_of_one_host() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = BertConfig(**shape, intermediate_size=1536, vocab_size=50, num_labels=150)
    host = BertForSequenceClassification(config).eval()
    members = []
    for _ in range(3):
        member = copy.deepcopy(host)
        nn.init.normal_(member.bert.encoder.layer[-1].output.dense.weight, std=0.02)
        members.append(member)
    ensemble = hydra.fuse(members, average="first")
    batch = {"input_ids": torch.full((1, 16), 7), "attention_mask": torch.ones(1, 16).long()}
    ratio = hydra.cost(ensemble, batch).relative_to(hydra.cost(host, batch))
    assert ratio.multiply_adds < 1.0
    assert ratio.bytes_on_disk < 1.2  # 1.2 million more weights of 10.9


# --- fuse(average="first") ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fused", "host"])
@pytest.mark.parametrize("name", ["bert", "vit", "timm", "distilbert"])
def test_members_keep_their_last_linear_layers_in_all_blocks(
    name: str, engine: Any, tmp_path: Path
) -> None:
    members = []
    for seed in range(2):
        member = zoo.make(name)
        for block in host_model(member).blocks:
            path = last_linear(block)
            assert path is not None
            layer = block.module.get_submodule(path)
            generator = torch.Generator().manual_seed(seed)
            layer.weight.data.add_(0.3 * torch.randn(layer.weight.shape, generator=generator))  # type: ignore[operator, arg-type]
        members.append(member)
    batch = zoo.batch(name, 5)
    ensemble = hydra.fuse(members, average="first", batch=batch, engine=engine)
    expected = answers(members, batch)
    torch.testing.assert_close(ensemble.member_logits(batch), expected, atol=1e-4, rtol=1e-4)
    averaged = hydra.fuse(members, batch=batch, engine=engine).predict(batch).member_logits
    assert float((averaged - expected).abs().max()) > 0.01
    hydra.verify(ensemble, batch)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.member_logits(batch), ensemble.member_logits(batch))
    if engine == "fused":
        loaded.untie_(mlps=True)
        hydra.verify(loaded, batch)
        torch.testing.assert_close(loaded.member_logits(batch), expected, atol=1e-4, rtol=1e-4)
        loaded.save_pretrained(tmp_path)
        hydra.verify(hydra.HydraEnsemble.from_pretrained(tmp_path), batch)


def test_first_layers_are_averaged() -> None:
    hosts = trio("vit")[:2]
    ensemble = hydra.fuse(hosts, average="first")
    for number, host in enumerate(hosts):
        mlp, own = ensemble.member(number).vit.layers[0].mlp, host.vit.layers[0].mlp  # type: ignore[union-attr, index]
        mean = (hosts[0].vit.layers[0].mlp.fc1.weight + hosts[1].vit.layers[0].mlp.fc1.weight) / 2  # type: ignore[union-attr, index]
        torch.testing.assert_close(mlp.fc1.weight, mean)
        assert mlp.fc2.weight.equal(own.fc2.weight)
    assert "MLPs" in ensemble.merged
