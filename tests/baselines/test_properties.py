"""What makes each rival what it is: a property of its formula that can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ensembles import evaluate
from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.hosts import host_model
from hydra_ensembles.research.rivals import make_baseline, relative_cost
from hydra_ensembles.research.rivals.parts import carry_uncertainty, find_classifier
from hydra_ensembles.uncertainty import energy, mean_probability

from ..zoo import batch as zoo_batch
from ..zoo import make as zoo_model
from ..zoo import run
from .quadrants import TEST, TRAIN, VALIDATION, host, logits, outliers

IMAGES = TEST[0][0]
QUICK: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-3, "progress": False}


def labelled(name: str) -> list[Any]:
    inputs = zoo_batch(name, size=6)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    return [{**inputs, "labels": labels}] if isinstance(inputs, dict) else [(inputs, labels)]


def test_a_temperature_changes_confidence_alone() -> None:
    data = [(10 * x, y) for x, y in VALIDATION]  # out of its depth, so over-confident
    rival = make_baseline("temperature", host(), validation=data, progress=False)
    plain, cooled = logits(host(), IMAGES), logits(rival, IMAGES)[:, 0]
    assert rival.temperature > 1.1
    torch.testing.assert_close(cooled * rival.temperature, plain)
    assert torch.equal(cooled.argmax(-1), plain.argmax(-1))


def test_members_of_a_deep_ensemble_differ_by_seed_and_repeat() -> None:
    rival = make_baseline("deep-ensemble", host(), train=TRAIN, **QUICK)
    again = make_baseline("deep-ensemble", host(), train=TRAIN, **QUICK)
    found = logits(rival, IMAGES)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3
    torch.testing.assert_close(found, logits(again, IMAGES), rtol=0, atol=0)


def test_a_stopped_deep_ensemble_goes_on(tmp_path: Path) -> None:
    make_baseline("deep-ensemble", host(), train=TRAIN, members=2, folder=tmp_path, **QUICK)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.safetensors"))
    assert files == [f"deep-ensemble/member-{m}/training.safetensors" for m in range(2)]


def test_dropout_draws_differ_and_average_to_the_host() -> None:
    rival = make_baseline("mc-dropout", host(), members=400, options={"rate": 0.02})
    draws = logits(rival, IMAGES[:4])
    assert draws.std(1).min() > 1e-4
    far = (draws.mean(1) - logits(host(), IMAGES[:4])).abs()
    assert far.mean() < 0.4 * draws.std(1).mean()  # dropout is unbiased to first order
    torch.testing.assert_close(draws, logits(rival, IMAGES[:4]), rtol=0, atol=0)


def test_dropout_uses_the_places_and_the_rate_of_the_host() -> None:
    model = zoo_model("bert")
    rival = make_baseline("mc-dropout", model)
    own = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    placed = [m for m in rival.modules() if type(m).__name__ == "AlwaysDropout"]
    assert len(placed) == len(own) > 0 and placed[0].rate == own[0].p
    found = run(rival, zoo_batch("bert"))
    assert found.shape == (4, 3, 5) and found.std(1).max() > 1e-3
    with pytest.raises(ValueError, match=r"rate=1\.5"):
        make_baseline("mc-dropout", model, options={"rate": 1.5})


@pytest.mark.parametrize("name", ["vit", "bert", "timm", "dinov2"])
def test_batch_ensemble_with_unit_factors_is_the_host(name: str) -> None:
    model, data = zoo_model(name), labelled(name)
    rival = make_baseline(
        "batch-ensemble", model, train=data, options={"spread": 0, "train": False}
    )
    found = run(rival, zoo_batch(name))
    expected = run(model, zoo_batch(name))[:, None].expand_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_batch_ensemble_factors_make_members() -> None:
    rival = make_baseline("batch-ensemble", host(), train=TRAIN, options={"train": False})
    found = logits(rival, IMAGES)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3
    alone = torch.cat([logits(rival, image[None]) for image in IMAGES[:5]])
    torch.testing.assert_close(found[:5], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "timm"])
def test_packed_members_never_mix(name: str) -> None:
    model, data = zoo_model(name), labelled(name)
    rival = make_baseline("packed-ensemble", model, train=data, members=2, **QUICK)
    before = run(rival, zoo_batch(name))
    assert before.shape == (4, 2, 5)
    # the upper half of the token stream belongs to the second member alone
    block = rival.host.get_submodule("vit.layers.0" if name == "vit" else "blocks.0")
    block.register_forward_hook(_shift_upper_half)
    after = run(rival, zoo_batch(name))
    torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=0)
    assert (after[:, 1] - before[:, 1]).abs().max() > 1e-3


def _shift_upper_half(module: nn.Module, inputs: Any, output: Any) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    shifted = states + torch.cat([torch.zeros(16), torch.linspace(-1, 1, 16)])
    return (shifted, *output[1:]) if isinstance(output, tuple) else shifted


def test_packing_needs_a_width_that_divides() -> None:
    with pytest.raises(UnsupportedModelError, match=r"width 24 .* into 5 members"):
        make_baseline("packed-ensemble", host(), train=TRAIN, members=5)


@pytest.mark.parametrize("name", ["vit", "bert", "timm"])
def test_lora_starts_as_the_host(name: str) -> None:
    model, data = zoo_model(name), labelled(name)
    rival = make_baseline("lora-ensemble", model, train=data, options={"train": False})
    found = run(rival, zoo_batch(name))
    torch.testing.assert_close(found, run(model, zoo_batch(name))[:, None].expand_as(found))


def test_lora_trains_updates_alone_and_stores_the_backbone_once() -> None:
    rival = make_baseline("lora-ensemble", host(), train=TRAIN, **QUICK)
    found = logits(rival, IMAGES)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-4
    ours, own = rival.models[2].state_dict(), host().state_dict()
    for name, value in own.items():
        there = (
            name
            if name in ours
            else name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
        )
        assert torch.equal(ours[there], value), name
    assert relative_cost(rival, host(), TEST[0]).parameters < 2


def test_rivals_of_the_last_layer_refuse_hosts_without_one() -> None:
    model = zoo_model("zero-shot-clip")
    with pytest.raises(UnsupportedModelError, match="does not end in a linear layer"):
        make_baseline("laplace", model, train=labelled("zero-shot-clip"))


@pytest.mark.parametrize("name", ["vit", "bert", "timm", "dinov2", "deit"])
def test_the_last_layer_is_found(name: str) -> None:
    model = zoo_model(name)
    path = find_classifier(model, zoo_batch(name))
    assert path is not None and model.get_submodule(path).out_features == 5


def test_an_uncertainty_travels_with_logits() -> None:
    plain, uncertainty = 9 * torch.randn(50, 7), 3 * torch.randn(50)
    carried = carry_uncertainty(plain, uncertainty)
    torch.testing.assert_close(carried.softmax(-1), plain.softmax(-1))
    torch.testing.assert_close(energy(carried[:, None]), uncertainty, rtol=1e-5, atol=1e-5)


def test_an_outlier_head_learns_its_outliers_and_leaves_predictions() -> None:
    data: dict[str, Any] = {"validation": VALIDATION, "ood": {"bright": outliers()}}
    rival = make_baseline("outlier-exposure", host(), progress=False, **data)
    far = {"same kind": outliers(seed=8)}
    own = evaluate(rival, TEST, ood=far, score=rival.score, progress=False)
    plain = evaluate(host(), TEST, ood=far, progress=False)
    assert own["ood/mean/AUROC"] > max(0.9, plain["ood/mean/AUROC"])
    torch.testing.assert_close(
        mean_probability(logits(rival, IMAGES)), mean_probability(logits(host(), IMAGES))
    )


def test_vilu_predicts_failures_of_a_zero_shot_classifier() -> None:
    model = zoo_model("zero-shot-clip")
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(300, 3, 16, 16, generator=draws)
    images[150:] += 3  # it is wrong on these: a rule that its embeddings show
    with torch.no_grad():
        guess = model(images).logits.argmax(-1)
    labels = torch.where(torch.arange(300) < 150, guess, (guess + 1) % 5)
    data = list(zip(images.split(50), labels.split(50), strict=True))
    train, test = data[:2] + data[4:], data[2:4]
    rival = make_baseline("vilu", model, train=train, progress=False, options={"steps": 200})
    results = evaluate(rival, test, score=rival.score, progress=False)
    plain = evaluate(model, test, progress=False)
    assert results["fail/AUROC"] > max(0.9, plain["fail/AUROC"])
    assert (
        results["cls/Acc"] == plain["cls/Acc"] and abs(results["cls/NLL"] - plain["cls/NLL"]) < 1e-5
    )


def test_vilu_wants_texts_and_mistakes() -> None:
    with pytest.raises(UnsupportedModelError, match="no text_embeddings"):
        make_baseline("vilu", host(), train=TRAIN)
    model = zoo_model("zero-shot-clip")
    images = zoo_batch("zero-shot-clip")
    right = run(model, images).argmax(-1)
    with pytest.raises(ValueError, match="wrong on 0 of 4"):
        make_baseline("vilu", model, train=[(images, right)], progress=False)


@pytest.mark.parametrize("name", ["taylor-single", "circavg-single"])
def test_pruned_singles_lose_heads_physically(name: str) -> None:
    data = {"train": TRAIN, "validation": VALIDATION, "ood": outliers()}
    rival = make_baseline(name, host(), options={"keep": 1 / 3}, **data, **QUICK)
    assert host_model(rival).head_counts == (1, 1)
    found = relative_cost(rival, host(), TEST[0])
    assert found.multiply_adds < 0.8 and found.parameters < 0.8


def test_hydra_by_taylor_merges_mlps_of_members_that_differ() -> None:
    rival = make_baseline("hydra-taylor", host(), train=TRAIN, **QUICK)
    one, two = (host_model(rival.member(m)).blocks[0] for m in (0, 1))
    assert torch.equal(one.module.mlp[0].weight, two.module.mlp[0].weight)
    assert not torch.equal(one.module.norm1.weight, two.module.norm1.weight)
    with pytest.raises(ValueError, match="2 shares to keep for 3 members"):
        make_baseline("hydra-taylor", host(), train=TRAIN, options={"keep": [0.5, 0.3]})


def test_replacing_layers_that_are_never_called_is_refused() -> None:
    model = zoo_model("zero-shot-open-clip")
    for name in ("batch-ensemble", "lora-ensemble"):
        with pytest.raises(UnsupportedModelError, match="never calls its projections"):
            make_baseline(name, model, train=labelled("zero-shot-open-clip"))
