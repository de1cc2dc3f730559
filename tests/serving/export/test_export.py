"""Exported programs answer as the ensemble does: outputs, rule, preprocessing, every size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles.errors import DataError, UnsupportedModelError, VerificationError
from hydra_ensembles.fusion.verification import tolerance_of
from hydra_ensembles.serving.agreement import check
from hydra_ensembles.serving.graph import exported_policy
from hydra_ensembles.uncertainty import Policy, novelty_fit
from hydra_ensembles.uncertainty.distances import Term
from hydra_ensembles.uncertainty.term_choice import Choice
from tests import zoo
from tests.serving.export.conftest import (
    image_ensemble,
    images,
    known_images,
    late_masks,
    tokenizer,
)

EXACT = ("probabilities", "uncertainty", "mutual_information", "member_logits")
OUTPUTS = (
    "class",
    "probabilities",
    "uncertainty",
    "mutual_information",
    "member_logits",
    "novelty",
    "novelty_score",
    "decision",
)


def columns(answer: hydra.Prediction) -> dict[str, np.ndarray]:
    return {**vars(answer), "class": answer.class_index}


def assert_answers(outputs: dict[str, np.ndarray], answer: hydra.Prediction) -> None:
    for name in EXACT:
        wanted = getattr(answer, name).numpy()
        np.testing.assert_allclose(outputs[name], wanted, atol=1e-4, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(outputs["class"], answer.class_index.numpy())
    if answer.novelty is not None:
        np.testing.assert_allclose(outputs["novelty"], answer.novelty.numpy(), atol=2.5e-2)
        np.testing.assert_allclose(outputs["novelty_score"], answer.novelty_score, atol=5e-2)


@pytest.mark.parametrize("size", [1, 3, 17])
def test_programs_answer_as_the_ensemble(exported: Any, size: int) -> None:
    ensemble, folder = exported
    batch = images(size, seed=200 + size)
    answer = ensemble.predict(batch)
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    outputs = runtime.load(folder).run(arrays)
    assert tuple(outputs) == OUTPUTS
    assert_answers(outputs, answer)
    codes = ensemble.policy.decide(answer.uncertainty, answer.novelty_score)
    np.testing.assert_array_equal(outputs["decision"], codes.numpy())
    np.testing.assert_array_equal(outputs["decision"], answer.code.numpy())


def test_every_kind_of_term_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thin statistics (fewer examples than half the width) and terms that a choice may take."""

    def every(examples: object, usual: dict[Term, float], **_: object) -> Choice:
        last = max(tap for _, tap in usual)
        kinds = ("distance", "class", "relative", "neighbour", "cosine")
        terms = {(kind, last): 1.0 for kind in kinds} | {("gen", -1): 1.0, ("entropy", -1): 1.0}
        return Choice(usual, terms)

    monkeypatch.setattr(novelty_fit, "choose_terms", every)
    ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"))).eval()
    known = [{**images(15, 3), "labels": torch.arange(15) % 3}]
    ensemble.fit_novelty_(known, progress=False)
    assert ensemble.novelty is not None
    assert ensemble.novelty.measures.distance.whitening.level is not None
    hydra.export(ensemble, tmp_path)
    batch = images(17, seed=5)
    outputs = runtime.load(tmp_path).run({name: tensor.numpy() for name, tensor in batch.items()})
    score = ensemble.predict(batch).novelty_score
    assert score is not None
    np.testing.assert_allclose(outputs["novelty_score"], score, atol=1e-4, rtol=1e-4)


def test_some_answers_are_withheld(exported: Any) -> None:
    ensemble, folder = exported
    batch = images(64, seed=400)
    model, arrays = runtime.load(folder), {k: v.numpy() for k, v in batch.items()}
    answer = model.predict(arrays)
    assert answer.decision == ensemble.predict(batch).decision
    assert set(answer.decision) == {"answer", "unsure", "new"}
    assert set(model.run(arrays)["decision"].tolist()) == {0, 1, 2, 3}


def test_without_a_policy_novelty_decides() -> None:
    ensemble = image_ensemble()
    ensemble.policy = None
    answer = ensemble.predict(images(64, seed=401))
    policy, words = exported_policy(None, ensemble, 0.1)
    decision = policy.decide(answer.uncertainty, answer.novelty_score)
    assert torch.equal(decision, (answer.novelty > 0.9).long() * 2)
    assert decision.sum() > 0
    assert "0.1 of the known data" in words
    everything, _ = exported_policy(None, ensemble, None)
    assert not everything.decide(answer.uncertainty, answer.novelty_score).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        exported_policy(None, ensemble, 5)


def test_the_ensemble_stays_as_it_was(exported: Any) -> None:
    ensemble, _ = exported
    assert all(block.bank.qkv is not None for block in ensemble.body.branch)
    fresh = image_ensemble()
    batch = images(4, seed=7)
    torch.testing.assert_close(
        ensemble.predict(batch).member_logits, fresh.predict(batch).member_logits
    )


def test_8_bits_are_smaller_and_near(exported: Any) -> None:
    ensemble, folder = exported
    batch = images(17, seed=300)
    small = runtime.load(folder, program="int8").run(
        {"pixel_values": batch["pixel_values"].numpy()}
    )
    answer = ensemble.predict(batch)
    np.testing.assert_allclose(small["probabilities"], answer.probabilities, atol=0.1)
    assert not np.allclose(small["probabilities"], answer.probabilities, atol=1e-5)
    assert (folder / "model.int8.onnx").stat().st_size < (folder / "model.onnx").stat().st_size


def test_images_are_prepared_inside(exported: Any, tmp_path: Path) -> None:
    ensemble, folder = exported
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30, 3), dtype=np.uint8)
    photos = [Image.fromarray(p) for p in pixels]
    model = runtime.load(folder)
    answer = ensemble.predict(photos)
    assert_answers(columns(model.predict(photos)), answer)
    assert_answers(columns(model.predict(list(pixels), batch_size=2)), answer)
    for number, photo in enumerate(photos):
        photo.save(tmp_path / f"{number}.png")
    found = model.predict([tmp_path / f"{n}.png" for n in range(3)])
    assert_answers(columns(found), answer)
    assert found.labels == answer.labels
    assert_answers(columns(model.predict(photos[0])), answer[0])


def test_the_contract_says_what_was_exported(exported: Any) -> None:
    ensemble, folder = exported
    data = json.loads((folder / "contract.json").read_text())
    assert data["task"] == "image-classification" and data["members"] == 3
    assert data["inputs"] == [
        {"name": "pixel_values", "dtype": "float32", "shape": ["batch", 3, 16, 16]}
    ]
    assert [port["name"] for port in data["outputs"]] == list(OUTPUTS)
    assert data["class_names"] == ["ant", "bee", "cat", "dog", "eel"]
    assert (data["score"], data["temperature"]) == ("entropy", 1.3)
    assert data["member_temperatures"] == [1.0, 2.0, 0.7]
    policy = ensemble.policy
    assert data["policies"]["onnx"]["uncertainty_above"] == pytest.approx(policy.threshold)
    newest = data["policies"]["onnx"]["novelty_score_above"]
    assert newest == pytest.approx(policy.novelty_threshold)
    assert data["preprocessing"]["size"] == [16, 16]
    assert sorted(data["files"]) == ["model.int8.onnx", "model.onnx"]
    assert data["agreement"]["largest_difference"]["onnx"]["probabilities"] < 1e-4
    assert not list(folder.glob(".*"))


def test_texts_with_a_tokenizer(tmp_path: Path) -> None:
    host = zoo._bert(num_labels=3, vocab_size=99)
    ensemble = hydra.fuse(zoo.seeded(lambda: host), late_masks(host, blocks=3)).eval()
    ensemble.tokenizer = tokenizer()
    ensemble.export(tmp_path)
    model = runtime.load(tmp_path)
    assert model.task == "text-classification"
    texts = ["A joy to watch!", "no", "", "fine plot " * 40, "unheard words, no joy"]
    answer = ensemble.predict(texts)
    assert_answers(columns(model.predict(texts)), answer)
    assert_answers(columns(model.predict(texts, batch_size=2)), answer)
    assert model.predict("no").novelty is None
    assert model.predict(texts).decision is None
    longest = {port["name"]: np.zeros((1, 25), np.int64) for port in model.contract.inputs}
    with pytest.raises(DataError, match="more than 24"):
        model.run(longest)


def test_a_decoder_with_padding_on_either_side(tmp_path: Path) -> None:
    host = zoo.sharp("llama")
    ensemble = hydra.fuse(host, late_masks(host, blocks=1)).eval()
    ensemble.fit_novelty_([zoo.texts(side=s) for s in ("left", "right")] * 5, progress=False)
    given = {k: v for k, v in zoo.texts().items() if k != "labels"}
    ensemble.export(tmp_path, example=given)
    model = runtime.load(tmp_path)
    for side in ("left", "right"):
        batch = {k: v for k, v in zoo.texts((9, 4, 1), side=side).items() if k != "labels"}
        outputs = model.run({name: tensor.numpy() for name, tensor in batch.items()})
        assert_answers(outputs, ensemble.predict(batch))


@pytest.mark.parametrize("name", ["timm", "zero-shot-clip", "distilbert"])
def test_other_hosts(name: str, tmp_path: Path) -> None:
    host = zoo.make(name)
    ensemble = hydra.fuse(host, late_masks(host)).eval()
    ensemble.score = "mcm" if name == "zero-shot-clip" else "energy"
    ensemble.export(tmp_path)
    model = runtime.load(tmp_path)
    (inputs, *_) = model.contract.inputs
    batch = zoo.batch(name, size=5, seed=3)
    named = batch if isinstance(batch, dict) else {inputs["name"]: batch}
    assert_answers(model.run({k: v.numpy() for k, v in named.items()}), ensemble.predict(batch))


def test_a_token_classifier_answers_for_every_token(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=4)
    host = zoo.seeded(lambda: BertForTokenClassification(config))
    ensemble = hydra.fuse(host, late_masks(host)).eval()
    ensemble.fit_novelty_(
        [zoo.batch("bert", size=8, seed=seed) for seed in range(4)], progress=False
    )
    ensemble.export(tmp_path, alarm=0.2)
    batch = zoo.batch("bert", size=3)
    outputs = runtime.load(tmp_path).run({k: v.numpy() for k, v in batch.items()})
    answer = ensemble.predict(batch)
    assert_answers(outputs, answer)
    new = answer.novelty.numpy() > 0.8  # a new text is new in every token
    np.testing.assert_array_equal(outputs["decision"], np.repeat(new[:, None] * 2, 7, 1))
    assert runtime.read_contract(tmp_path).data["task"] == "token-classification"


def test_a_tower_that_projects_gives_its_vectors(tmp_path: Path) -> None:
    tower = hydra.fuse(zoo.make("clip-vision"), late_masks(zoo.host("clip-vision"))).eval()
    batch = {"pixel_values": zoo.batch("clip-vision")}
    tower.export(tmp_path, example=batch)
    found = runtime.load(tmp_path).answer({"pixel_values": batch["pixel_values"].numpy()}).embedding
    expected = tower.predict(batch).embedding
    assert np.allclose(found, expected, atol=1e-5)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="Only a HydraEnsemble"):
        hydra.export(zoo.host("vit"), tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_program_that_answers_otherwise_is_refused() -> None:
    good = {
        "class": np.array([1, 0]),
        "probabilities": np.array([[0.3, 0.7], [0.5, 0.5]], np.float32),
        "uncertainty": np.array([0.3, 0.5], np.float32),
        "mutual_information": np.array([0.1, 0.0], np.float32),
        "member_logits": np.ones((2, 1, 2), np.float32),
        "decision": np.array([0, 1]),
    }
    policy = Policy(threshold=0.4)

    def compare(**changed: np.ndarray) -> None:
        check({**good, **changed}, good, policy, tolerance=1e-4, ranks=None, what="onnx")

    compare()
    compare(**{"class": np.array([1, 1])})  # a tie
    for wrong in (
        {"class": np.array([0, 0])},
        {"probabilities": good["probabilities"] + np.float32(2e-4)},
        {"decision": np.array([2, 1])},
        {"member_logits": good["member_logits"] * np.float32(np.nan)},
        {"uncertainty": good["uncertainty"].astype(np.float64)},
    ):
        with pytest.raises(VerificationError):
            compare(**wrong)


@pytest.mark.parametrize(("name", "dtype"), [("vit", torch.bfloat16), ("timm", torch.float16)])
def test_a_half_precision_ensemble_becomes_a_program_in_float32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    ensemble = hydra.fuse(zoo.make(name), late_masks(zoo.host(name))).eval().to(dtype)
    made = ensemble.export(tmp_path)
    assert made.differences["onnx"]["probabilities"] < 1e-4
    assert ensemble.dtype == dtype
    images = zoo.batch(name, size=4)
    outputs = runtime.load(tmp_path).run({"pixel_values": images.numpy()})
    half = ensemble.predict(images.to(dtype))
    rounding = tolerance_of(dtype)
    np.testing.assert_allclose(outputs["probabilities"], half.probabilities, atol=rounding)
    assert_answers(outputs, ensemble.float().predict(images))


def test_novelty_of_another_precision_is_not_exported(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    with torch.autocast("cpu", torch.bfloat16):
        ensemble.policy = None
        ensemble.fit_novelty_(known_images(), progress=False)
    with pytest.raises(DataError, match=r"under autocast.*ensemble\.float\(\)"):
        ensemble.export(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_host_of_a_fixed_batch_is_refused_with_what_to_change(tmp_path: Path) -> None:
    from hydra_ensembles.hosts.tiny_vit import TinyViT

    class Fixed(TinyViT):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return super().forward(pixel_values[: len(pixel_values)])

    host = Fixed().eval()
    ensemble = hydra.fuse(host, late_masks(host, blocks=1))
    images = {"pixel_values": torch.rand(2, 1, 16, 16)}
    with pytest.raises(UnsupportedModelError, match=r"write tensor\.shape\[0\]"):
        ensemble.export(tmp_path, example=images)
    assert not list(tmp_path.iterdir())


def test_8_bits_that_decide_differently_are_warned_of(exported: Any, monkeypatch: Any) -> None:
    from hydra_ensembles.serving import agreement
    from hydra_ensembles.serving.export_example import example_of

    ensemble, folder = exported
    inputs = example_of(ensemble, images(17, 99))
    monkeypatch.setattr(agreement, "DIFFERENT", -1.0)
    policy, _ = exported_policy(ensemble.policy, ensemble, None)
    with pytest.warns(UserWarning, match="decides differently"):
        agreement.compare(ensemble, inputs, policy, folder, 1e-4)
