"""`prune`: within the budget, closer to the dense model than without refit, saved and loaded."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.errors import DataError, FormatError, MaskError, UnsupportedModelError
from hydra_ensembles.heads import UnitMask, prune_units_
from hydra_ensembles.hosts import host_model
from hydra_ensembles.refit.readout_fit import refit_readout_
from hydra_ensembles.refit.uniform_width import find_width_settings
from tests import zoo
from tests.refit.test_folding import perturbed
from tests.refit.test_refit_run import FAMILIES, GROUPED, apart, batch, data, doubled, host

UNIFORM = {
    "bert": (False, "intermediate_size"),
    "vit": (False, "intermediate_size"),
    "distilbert": (False, "hidden_dim"),
    "clip-classifier": (False, "vision_config.intermediate_size"),
    "gpt2": (False, "n_inner"),
    "llama": (True, "intermediate_size"),
    "gemma2": (True, "intermediate_size"),
}
"""Whether heads can go too, and the setting of the neurons."""


@cache
def dense(name: str) -> nn.Module:
    """A host with heads and neurons that nearly repeat each other, as trained ones have."""
    return perturbed(doubled(host(name)), 0)


@cache
def pruned(name: str) -> Any:
    return hydra.prune(dense(name), data(name), max_cost=0.7, progress=False)


def ratio(model: nn.Module, name: str) -> float:
    counted = hydra.cost(model, batch(name)).relative_to(hydra.cost(dense(name), batch(name)))
    return counted.multiply_adds


@pytest.mark.parametrize("name", FAMILIES)
def test_the_budget_is_met_and_refit_helps(name: str) -> None:
    before = model_fingerprint(dense(name))
    model, fresh = pruned(name), batch(name, 60, seed=99)
    assert model_fingerprint(dense(name)) == before
    record = model.hydra_record
    assert 0.6 < ratio(model, name) <= 0.7 and record["cost"] == pytest.approx(ratio(model, name))
    view = host_model(model)
    assert [kept for kept, _ in record["heads"]] == list(view.head_counts)
    assert [kept for kept, _ in record["neurons"]] == list(view.neuron_counts)
    plain = prune_units_(copy.deepcopy(dense(name)), _mask_of(model, dense(name)))
    assert apart(model, dense(name), fresh) < 0.7 * apart(plain, dense(name), fresh)


def _mask_of(model: nn.Module, whole: nn.Module) -> UnitMask:
    """Find the kept units of a pruned model by the rows that it still has."""
    from hydra_ensembles.hosts.mlp_site import MlpSite

    ours, theirs = host_model(model), host_model(whole)
    heads, neurons = [], []
    for a, b, mlp in zip(ours.blocks, theirs.blocks, theirs.mlps, strict=True):
        assert isinstance(mlp, MlpSite)
        rows = a.attention.weights().query, b.attention.weights().query
        heads.append([any(q.equal(k) for k in rows[0]) for q in rows[1]])
        first = mlp.first[0]
        few, many = (
            m.weight.t() if type(m).__name__ == "Conv1D" else m.weight
            for m in (block.module.get_submodule(first) for block in (a, b))
        )
        neurons.append([any(row.equal(k) for k in few) for row in many[: mlp.neurons]])
    return UnitMask(heads, neurons)


@pytest.mark.parametrize("name", [*FAMILIES, "clip-text", "dinov2"])
def test_saved_is_loaded(name: str, tmp_path: Path) -> None:
    model = pruned(name)
    hydra.save(model, tmp_path)
    loaded = hydra.load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.hydra_record == model.hydra_record
    torch.testing.assert_close(
        zoo.run(loaded, batch(name)), zoo.run(model, batch(name)), atol=1e-6, rtol=1e-6
    )
    again = loaded.state_dict()
    assert all(again[key].equal(value) for key, value in model.state_dict().items())
    assert ratio(loaded, name) == ratio(model, name)


def test_ensembles_are_saved_and_loaded_by_the_same_names(tmp_path: Path) -> None:
    ensemble = hydra.fuse(host("bert"), [hydra.HeadMask.full(host("bert"))])
    hydra.save(ensemble, tmp_path / "one")
    assert isinstance(hydra.load(tmp_path / "one"), hydra.HydraEnsemble)
    hydra.save(host("bert"), tmp_path / "host")  # not pruned
    assert type(hydra.load(tmp_path / "host")) is type(host("bert"))
    assert hydra.HydraEnsemble.from_pretrained(tmp_path / "host").members == 1
    with pytest.raises(UnsupportedModelError, match="Cannot save a dict"):
        hydra.save({}, tmp_path)  # type: ignore[arg-type]
    weights = tmp_path / "host" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(FormatError):
        hydra.load(tmp_path / "host")


@pytest.mark.parametrize("name", UNIFORM)
def test_equal_widths_are_loaded_by_stock_transformers(name: str, tmp_path: Path) -> None:
    whole, heads_go = copy.deepcopy(dense(name)), UNIFORM[name][0]
    with torch.no_grad():
        for block in host_model(whole).blocks if heads_go else ():
            block.attention.output.weight.mul_(0.1)  # heads that say little go first
    max_cost = 0.6 if heads_go else 0.75
    model: Any = hydra.prune(whole, data(name), max_cost=max_cost, uniform=True, progress=False)
    view = host_model(model)
    heads, neurons = view.head_counts, view.neuron_counts
    assert len(set(heads)) == len(set(neurons)) == 1
    assert neurons[0] < host_model(whole).neuron_counts[0]
    assert (heads[0] < host_model(whole).head_counts[0]) is heads_go
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
    value: Any = loaded.config
    for part in UNIFORM[name][1].split("."):
        value = getattr(value, part)
    assert value == neurons[0]
    assert zoo.run(loaded, batch(name)).equal(zoo.run(model, batch(name)))
    assert ratio(model, name) <= max_cost
    assert apart(model, whole, batch(name, seed=99)) < 0.5


def test_hosts_without_such_a_config_say_why() -> None:
    for name, reason in (("timm", "only models of transformers"), ("dinov2", "no setting")):
        with pytest.raises(UnsupportedModelError, match=reason):
            hydra.prune(host(name), data(name), uniform=True, progress=False)
    assert find_width_settings(host_model(host("llama"))).heads is not None


def test_a_run_continues_and_other_settings_are_refused(tmp_path: Path) -> None:
    def run(**options: Any) -> nn.Module:
        options = {"max_cost": 0.7, "folder": tmp_path, "progress": False, **options}
        return hydra.prune(dense("bert"), data("bert"), **options)

    first, again = run(), run()
    assert model_fingerprint(first) == model_fingerprint(again) == model_fingerprint(pruned("bert"))
    for options, change in (
        ({"max_cost": 0.6}, "max_cost was 0.7, is 0.6"),
        ({"seed": 3}, "seed was 0, is 3"),
        ({"criterion": "magnitude"}, "criterion was not set"),
    ):
        with pytest.raises(FormatError, match=change):
            run(**options)


def test_the_classifier_follows_the_logits() -> None:
    whole = dense("phi3")  # a decoder that classifies: its linear runs for all tokens
    model = prune_units_(copy.deepcopy(whole), UnitMask.random(whole, keep=1.0, seed=0))
    with torch.no_grad():
        model.score.weight.mul_(0.5)
    fitted = refit_readout_(model, whole, data("phi3"), progress=False)
    assert not isinstance(fitted, str) and fitted.error < 1e-9 < fitted.given_error
    torch.testing.assert_close(model.score.weight, whole.score.weight, atol=1e-4, rtol=1e-4)
    assert isinstance(refit_readout_(host("llama"), host("llama"), data("llama")), str)
    assert isinstance(refit_readout_(host("deit-teacher"), host("deit-teacher"), data("vit")), str)


@pytest.mark.parametrize("method", ["select", "parts"])
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_pruned_model_is_a_host_like_any_other(name: str, method: str, tmp_path: Path) -> None:
    model = pruned(name)
    assert any(kept < heads for kept, heads in model.hydra_record["heads"])
    labelled = [_labelled(one, zoo.run(dense(name), one).argmax(-1)) for one in data(name)]
    options: dict[str, Any] = {"members": 2, "max_cost": 1.5, "novelty": False, "progress": False}
    ensemble = hydra.build(model, labelled, method=method, **options)
    hydra.verify(ensemble, batch(name))
    counted = hydra.cost(ensemble, batch(name)).relative_to(hydra.cost(model, batch(name)))
    assert ensemble.record["cost"] == pytest.approx(counted.multiply_adds, rel=1e-6)
    hydra.save(ensemble, tmp_path)
    loaded = hydra.load(tmp_path).predict(batch(name))
    assert loaded.probabilities.equal(ensemble.predict(batch(name)).probabilities)


def _labelled(inputs: Any, labels: torch.Tensor) -> Any:
    return {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)


def test_labels_are_used_where_they_are_needed_and_figures_compare_both_models() -> None:
    whole = dense("vit")
    labelled = [(one, zoo.run(whole, one).argmax(-1)) for one in data("vit")]
    model = hydra.prune(
        whole, labelled, max_cost=0.7, criterion="fisher", held_out=labelled, progress=False
    )
    record = model.hydra_record
    assert record["criterion"] == "fisher"
    assert record["held_out"]["dense"]["cls/Acc"] == 1.0 > record["held_out"]["pruned"]["cls/Acc"]
    with pytest.raises(DataError, match="label"):
        hydra.prune(whole, data("vit"), criterion="fisher", progress=False)


def test_language_models_are_compared_by_perplexity() -> None:
    model = hydra.prune(
        dense("llama"), data("llama"), max_cost=0.9, held_out=data("llama"), progress=False
    )
    figures = model.hydra_record["held_out"]
    assert 1.0 < figures["dense"]["perplexity"] != figures["pruned"]["perplexity"]


def _experts() -> nn.Module:
    from transformers import MixtralConfig, MixtralForSequenceClassification

    config = MixtralConfig(**GROUPED, num_local_experts=2, sliding_window=None)
    return MixtralForSequenceClassification(config)


def test_what_stays_is_said_and_what_cannot_be_pruned_is_refused() -> None:
    whole = zoo.seeded(_experts)
    model = hydra.prune(whole, data("phi3"), max_cost=0.9, progress=False)
    assert any("Neurons stay: " in n and "experts" in n for n in model.hydra_record["notes"])
    assert min(host_model(model).head_counts) == 2
    with pytest.raises(MaskError, match=r"costs 0\.520 x"):
        hydra.prune(whole, data("phi3"), max_cost=0.1, progress=False)


def test_bad_input_is_refused() -> None:
    whole = host("vit")
    with pytest.raises(UnsupportedModelError, match="HydraEnsemble"):
        hydra.prune(hydra.fuse(whole, [hydra.HeadMask.full(whole)]), data("vit"))
    with pytest.raises(MaskError, match=r"max_cost=1\.5"):
        hydra.prune(whole, data("vit"), max_cost=1.5)
    with pytest.raises(MaskError, match="cannot be met"):
        hydra.prune(whole, data("vit"), max_cost=0.05, progress=False)
    with pytest.raises(DataError, match="no batches"):
        hydra.prune(whole, [])
    broken = [batch("vit"), batch("vit") * torch.nan]
    with pytest.raises(DataError, match="NaN"):
        hydra.prune(whole, broken, progress=False)
    with pytest.raises(DataError, match="too few"):
        hydra.prune(whole, [batch("vit", 2)], progress=False)
