"""Pipelines answer as transformers' do, and say how sure and how new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import DataError, UnknownNameError, UnsupportedModelError
from hydra_ensembles.prediction import FIELDS
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import picture, words

pytestmark = pytest.mark.filterwarnings("ignore")


def known(name: str) -> list[Any]:
    batch = zoo.batch(name, size=40, seed=5)
    return [batch]


@pytest.mark.parametrize("novelty", [False, True])
def test_pictures(novelty: bool, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import ViTImageProcessor, pipeline

    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    if novelty:
        ensemble.fit_novelty_(known("vit"), progress=False)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    ensemble.transform = processor
    classify = hydra.pipeline("image-classification", ensemble)
    plain = pipeline("image-classification", model=ensemble, image_processor=processor)
    assert "not supported" not in capfd.readouterr().err
    pictures = [picture(seed) for seed in range(5)]
    answer = ensemble.predict(pictures)
    for batch_size in (1, 2):
        found = classify(pictures, top_k=3, batch_size=batch_size)
        for row, (entries, reference) in enumerate(
            zip(found, plain(pictures, top_k=3), strict=True)
        ):
            assert [e["label"] for e in entries] == [e["label"] for e in reference]
            for entry, other in zip(entries, reference, strict=True):
                assert entry["score"] == pytest.approx(other["score"], abs=1e-5)
                said = float(answer.uncertainty[row])
                assert entry["uncertainty"] == pytest.approx(said, abs=1e-5)
                assert (entry["novelty"] is not None) is novelty and entry["decision"] is None
                if novelty:
                    assert entry["novelty"] == pytest.approx(float(answer.novelty[row]), abs=1e-4)
    pictures[0].save(tmp_path / "0.png")
    [first, *_] = classify(str(tmp_path / "0.png"))
    assert first["uncertainty"] == pytest.approx(float(answer.uncertainty[0]), abs=1e-5)


def test_a_transform_of_ours_and_a_folder(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    with pytest.raises(DataError, match="no transform"):
        hydra.pipeline("image-classification", ensemble)
    ensemble.transform = ImageTransform(size=16, crop=0.9, mean=(0.5,) * 3, std=(0.5,) * 3)
    ensemble.save_pretrained(tmp_path)
    classify = hydra.pipeline("image-classification", tmp_path, batch_size=2)
    answer = ensemble.predict([picture(0), picture(1), picture(2)])
    found = classify([picture(0), picture(1), picture(2)], top_k=1)
    for row, [entry] in enumerate(found):
        assert entry["score"] == pytest.approx(float(answer.confidence[row]), abs=1e-5)
        assert entry["uncertainty"] == pytest.approx(float(answer.uncertainty[row]), abs=1e-5)


def test_texts(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    with pytest.raises(DataError, match="no tokenizer"):
        hydra.pipeline("text-classification", ensemble)
    ensemble.tokenizer = words(tmp_path)
    ensemble.fit_novelty_(known("bert"), progress=False)
    classify = hydra.pipeline("text-classification", ensemble)
    texts = ["a good film", "bad", "films"]
    answer = ensemble.predict(texts)
    one = classify(texts[0])
    assert [set(entry) for entry in one] == [{*FIELDS, "score"} - {"class"}]
    for row, entry in enumerate(classify(texts, batch_size=2)):
        assert entry["score"] == pytest.approx(float(answer.confidence[row]), abs=1e-5)
        assert entry["uncertainty"] == pytest.approx(float(answer.uncertainty[row]), abs=1e-5)
        assert entry["novelty"] == pytest.approx(float(answer.novelty[row]), abs=1e-4)
    every = classify(texts[0], top_k=None)
    assert sum(entry["score"] for entry in every) == pytest.approx(1, abs=1e-5)


def tagger(tmp_path: Path) -> hydra.HydraEnsemble:
    from transformers import BertConfig, BertForTokenClassification

    def build() -> torch.nn.Module:
        return BertForTokenClassification(BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=3))

    model = zoo.seeded(build, sharpen=2)
    with torch.no_grad():
        model.classifier.weight.mul_(40)
        model.bert.embeddings.word_embeddings.weight.mul_(50)  # the word decides
    model.config.id2label = {0: "O", 1: "I-KIND", 2: "I-PLACE"}
    ensemble = hydra.fuse(model, EARLY)
    ensemble.tokenizer = words(tmp_path)
    return ensemble


def test_tokens_each_have_their_uncertainty(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ensemble = tagger(tmp_path)
    ensemble.fit_novelty_(known("bert"), progress=False)
    tag = hydra.pipeline("token-classification", ensemble)
    assert "not supported" not in capfd.readouterr().err and "text" in repr(tag)
    text = "a good films bad film good a bad"
    answer = ensemble.predict(text)
    entities = tag(text, ignore_labels=[])
    assert len(entities) == 9  # films is two word pieces
    for place, entity in enumerate(entities, start=1):  # the first token is [CLS]
        assert entity["index"] == place
        said = float(answer.uncertainty[0, place])
        assert entity["uncertainty"] == pytest.approx(said, abs=1e-5)
        assert entity["novelty"] == pytest.approx(float(answer.novelty[0]), abs=1e-4)
    assert len({round(entity["uncertainty"], 4) for entity in entities}) > 3
    # a group is as unsure as its least sure token
    groups = tag(text, ignore_labels=[], aggregation_strategy="simple")
    assert 1 < len(groups) < 9
    for group in groups:
        inside = [e for e in entities if group["start"] <= e["start"] < group["end"]]
        assert group["uncertainty"] == max(entity["uncertainty"] for entity in inside)
    # words that are split already, and several texts in one batch
    split = tag(text.split(), is_split_into_words=True, ignore_labels=[])
    split = split[0] if isinstance(split[0], list) else split
    assert [e["uncertainty"] for e in split] == pytest.approx(
        [e["uncertainty"] for e in entities], abs=1e-5
    )
    grouped = tag(
        text.split(), is_split_into_words=True, ignore_labels=[], aggregation_strategy="simple"
    )
    grouped = grouped[0] if isinstance(grouped[0], list) else grouped
    assert [g["uncertainty"] for g in grouped] == pytest.approx(
        [g["uncertainty"] for g in groups], abs=1e-5
    )
    both = tag([text, "bad film"], ignore_labels=[], batch_size=2)
    assert [e["uncertainty"] for e in both[0]] == pytest.approx(
        [e["uncertainty"] for e in entities], abs=1e-5
    )


def test_a_long_text_is_read_in_pieces(tmp_path: Path) -> None:
    ensemble = tagger(tmp_path)
    ensemble.tokenizer.model_max_length = 8
    tag = hydra.pipeline("token-classification", ensemble)
    text = "a good film bad good a film bad a good film bad"
    groups = tag(text, ignore_labels=[], aggregation_strategy="simple", stride=2)
    assert groups[-1]["end"] == len(text)
    assert all(0 < group["uncertainty"] < 1 for group in groups)


def test_a_policy_is_told(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(tmp_path)
    batch = {**zoo.batch("bert", size=200, seed=5), "labels": torch.arange(200) % 5}
    ensemble.fit_novelty_([batch], progress=False)
    hydra.fit_policy(ensemble, [batch], risk=0.5, alarm=0.05)
    [entry] = hydra.pipeline("text-classification", ensemble)("a good film")
    answer = ensemble.predict("a good film")
    assert [entry["decision"], entry["why"]] == [answer.decision[0], answer.why[0]]


def test_refusals() -> None:
    ensemble = hydra.fuse(zoo.host("timm"), EARLY)
    with pytest.raises(UnsupportedModelError, match="not a model of transformers"):
        hydra.pipeline("image-classification", ensemble)
    with pytest.raises(UnknownNameError, match="text-classification"):
        hydra.pipeline("text-generation", ensemble)
