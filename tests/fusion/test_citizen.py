"""The ensemble as a citizen: outputs, gradients, compile, autocast, Trainer, pipeline."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.errors import HydraError, UnsupportedModelError
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, perturbed


@pytest.mark.parametrize("name", zoo.CLASSIFIERS)
def test_logits_are_the_log_of_the_mean_probability(name: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    inputs = zoo.batch(name)
    with torch.no_grad():
        output = ensemble(**inputs) if isinstance(inputs, dict) else ensemble(inputs)
        expected = ensemble.member_logits(inputs).softmax(-1).mean(1)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    torch.testing.assert_close(logits.softmax(-1), expected)
    torch.testing.assert_close(logits.exp(), expected)
    plain = zoo.host(name)(**inputs) if isinstance(inputs, dict) else zoo.host(name)(inputs)
    assert type(output) is type(plain)


def test_labels_give_the_loss_of_the_mean_probability() -> None:
    labels = torch.tensor([0, 1, 2, 3])
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    output = ensemble(**zoo.batch("bert"), labels=labels)
    probabilities = ensemble.predict(zoo.batch("bert")).probabilities
    expected = -probabilities[torch.arange(4), labels].log().mean()
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(
        hydra.fuse(zoo.host("timm"), EARLY)(zoo.batch("timm"), labels=labels).logits,
        hydra.fuse(zoo.host("timm"), EARLY)(zoo.batch("timm")),
    )
    as_tuple = ensemble(**zoo.batch("bert"), labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == 2


def test_predict_takes_every_form_of_batch_and_applies_temperatures() -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    inputs = zoo.batch("bert")
    one = ensemble.predict(inputs)
    other = ensemble.predict({**inputs, "labels": torch.zeros(4, dtype=torch.long)})
    assert torch.equal(one.probabilities, other.probabilities)
    assert one.member_logits.shape == (4, 3, 5)
    ensemble.temperature, ensemble.member_temperatures = 2.0, [1.0, 2.0, 4.0]
    scaled = one.member_logits / 2.0 / torch.tensor([1.0, 2.0, 4.0])[:, None]
    expected = scaled.softmax(-1).mean(1)
    torch.testing.assert_close(ensemble.predict(inputs).probabilities, expected)
    torch.testing.assert_close(ensemble(**inputs).logits.exp(), expected)


def test_gradients_reach_shared_heads_and_match_gates() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    labels = torch.tensor([0, 1, 2, 3])
    ensemble(zoo.batch("vit"), labels=labels).loss.backward()
    bank = ensemble.body.branch[0].bank
    model = copy.deepcopy(zoo.host("vit")).requires_grad_(True)
    logits = []
    for mask in EARLY:
        with hydra.gate(model, mask):
            logits.append(model(zoo.batch("vit")).logits)
    mean = torch.stack(logits).softmax(-1).mean(0)
    (-mean[torch.arange(4), labels].log().mean()).backward()
    weight = model.vit.layers[0].attention.q_proj.weight.grad.unflatten(0, (4, 8))
    kept = sorted({head for mask in EARLY for head in mask.indices(0)})
    heads = {h: i for i, h in enumerate(_order(EARLY))}
    for head in kept:
        torch.testing.assert_close(
            bank.qkv.grad[0, heads[head]], weight[head], atol=1e-6, rtol=1e-4
        )


def _order(masks: list[hydra.HeadMask]) -> list[int]:
    """Heads in the order in which members bring them."""
    seen: list[int] = []
    for mask in masks:
        seen += [head for head in mask.indices(0) if head not in seen]
    return seen


def test_a_step_of_training_is_seen_by_the_next_forward() -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY).untie_()
    inputs, labels = zoo.batch("bert"), torch.tensor([0, 1, 2, 3])
    before = ensemble.predict(inputs).probabilities
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    ensemble(**inputs, labels=labels).loss.backward()
    optimizer.step()
    after = ensemble.predict(inputs).probabilities
    assert (before - after).abs().max() > 1e-4
    assert ensemble(**inputs, labels=labels).loss < -before[torch.arange(4), labels].log().mean()
    hydra.verify(ensemble, inputs)


def test_the_frozen_trunk_has_no_gradients() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), LATE).freeze_trunk_()
    trainable = {n for n, p in ensemble.named_parameters() if p.requires_grad}
    assert trainable
    assert not any("trunk" in name or "embeddings" in name for name in trainable)
    assert any("classifier" in name for name in trainable)
    members = [perturbed(zoo.host("vit"), seed) for seed in range(3)]
    split = hydra.fuse(members, LATE).freeze_trunk_()
    trainable = {n for n, p in split.named_parameters() if p.requires_grad}
    assert {f"host.classifier.each.{m}.weight" for m in range(3)} <= trainable


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_compile_breaks_the_graph_no_more_than_the_host(name: str) -> None:
    import torch._dynamo

    inputs = zoo.batch(name)
    model = zoo.host(name)

    def breaks(module: torch.nn.Module) -> int:
        torch._dynamo.reset()
        call = (lambda: module(**inputs)) if isinstance(inputs, dict) else (lambda: module(inputs))
        with torch.no_grad():
            return torch._dynamo.explain(call)().graph_break_count

    ensemble = hydra.fuse(model, LATE)
    ensemble.predict(inputs)
    assert breaks(ensemble) <= breaks(model)
    torch._dynamo.reset()
    compiled = torch.compile(ensemble, backend="eager")
    with torch.no_grad():
        actual = compiled(**inputs) if isinstance(inputs, dict) else compiled(inputs)
        expected = ensemble(**inputs) if isinstance(inputs, dict) else ensemble(inputs)
    torch.testing.assert_close(actual.logits, expected.logits)


@pytest.mark.parametrize("name", ["vit", "bert", "timm"])
def test_bfloat16_and_autocast(name: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    inputs = zoo.batch(name)
    expected = ensemble.predict(inputs).probabilities
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = ensemble.predict(inputs).probabilities
    torch.testing.assert_close(autocast, expected, atol=0.1, rtol=0)
    half = copy.deepcopy(ensemble).to(torch.bfloat16)
    inputs = inputs if isinstance(inputs, dict) else inputs.bfloat16()
    torch.testing.assert_close(half.predict(inputs).probabilities, expected, atol=0.15, rtol=0)


def test_signature_is_the_hosts() -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    names = set(inspect.signature(ensemble.forward).parameters)
    assert {"input_ids", "attention_mask", "token_type_ids", "labels"} <= names
    assert isinstance(ensemble, hydra.HydraEnsemble)
    assert isinstance(copy.deepcopy(ensemble), hydra.HydraEnsemble)


@pytest.mark.filterwarnings("ignore")
def test_trainer_trains_and_evaluates(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    ensemble = hydra.fuse(zoo.make("bert"), EARLY).untie_()
    ids, mask = zoo.batch("bert", size=8).values()
    rows = [
        {"input_ids": ids[i], "attention_mask": mask[i], "labels": i % 5, "unused": "x"}
        for i in range(8)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    import datasets

    data = datasets.Dataset.from_list(
        [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()} for row in rows]
    )
    trainer = Trainer(model=ensemble, args=arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(data).predictions.shape == (8, 5)


@pytest.mark.filterwarnings("ignore")
def test_pipeline_takes_it(capfd: pytest.CaptureFixture[str]) -> None:
    from PIL import Image
    from transformers import ViTImageProcessor, pipeline

    model = zoo.make("vit")
    model.config.id2label = {i: f"kind {i}" for i in range(5)}
    ensemble = hydra.fuse(model, EARLY)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    classify = pipeline("image-classification", model=ensemble, image_processor=processor)
    assert "not supported" not in capfd.readouterr().err
    image = Image.effect_noise((16, 16), 80).convert("RGB")
    answer = classify(image, top_k=5)
    assert {entry["label"] for entry in answer} == set(model.config.id2label.values())
    inputs = processor(image, return_tensors="pt")
    expected = ensemble.predict(dict(inputs)).probabilities.max()
    assert answer[0]["score"] == pytest.approx(float(expected), abs=1e-5)


def test_refusals_are_clear() -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    with pytest.raises(UnsupportedModelError, match=r"ensemble\.member"):
        ensemble(**zoo.batch("bert"), output_attentions=True)
    with pytest.raises(UnsupportedModelError, match=r"ensemble\.member"):
        ensemble(**zoo.batch("bert"), output_hidden_states=True)
    answer = hydra.fuse(zoo.host("clip-vision"), EARLY).predict(zoo.batch("clip-vision"))
    with pytest.raises(AttributeError, match=r"has no 'probabilities'.*embedding"):
        answer.probabilities  # noqa: B018
    with pytest.raises(IndexError, match="count from 0"):
        ensemble.member(3)
    loop = hydra.fuse(zoo.host("bert"), EARLY, mode="loop").train()
    with pytest.raises(HydraError, match="cannot be trained"):
        loop(**zoo.batch("bert"))
    for problem, task in {
        "multi_label_classification": "multi-label",
        "regression": "regression",
    }.items():
        model = copy.deepcopy(zoo.host("bert"))
        model.config.problem_type = problem
        assert hydra.fuse(model, EARLY).task.name == task
        assert hydra.explain(model).fusable


def test_str_says_what_was_built() -> None:
    text = str(hydra.fuse(zoo.host("vit"), LATE))
    assert "3 members" in text
    assert "blocks 0-1" in text
    assert "block 2: 2 + 2 + 1 of 4 heads, readout only" in text
    assert "x multiply-adds" in text
    assert "MiB" in text


def test_it_can_be_pickled_and_saved_by_torch(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    assert type(ensemble) is hydra.HydraEnsemble
    ensemble.temperature = 1.5
    again = pickle.loads(pickle.dumps(ensemble))
    torch.save(ensemble, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    batch = zoo.batch("vit")
    expected = ensemble.predict(batch).probabilities
    for other in (again, loaded):
        assert type(other) is hydra.HydraEnsemble
        assert torch.equal(other.predict(batch).probabilities, expected)
