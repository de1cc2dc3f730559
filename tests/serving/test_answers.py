"""The service says what the ensemble says, over every way in."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import hydra_ensembles as hydra
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.prediction import FIELDS
from tests.serving.conftest import client_of, picture, png

PICTURES = [picture(seed) for seed in range(3)]
TEXTS = ["a very good film", "bad", "a dull dull story films"]


def same(records: list[dict[str, Any]], ensemble: HydraEnsemble, inputs: Any) -> None:
    expected = ensemble.predict(inputs)
    assert len(records) == len(expected)
    for i, record in enumerate(records):
        assert list(record) == list(FIELDS)
        assert record["class"] == int(expected.class_index[i])
        assert record["label"] == expected.labels[i]
        pairs = {
            "confidence": expected.confidence,
            "uncertainty": expected.uncertainty,
            "mutual_information": expected.mutual_information,
            "novelty": expected.novelty,
            "novelty_score": expected.novelty_score,
        }
        for name, column in pairs.items():
            assert column is not None
            assert record[name] == pytest.approx(float(column[i]), rel=1e-4, abs=2e-6), name
        new = record["novelty"] > 0.95
        assert record["decision"] == ("new" if new else "answer")
        assert record["why"] == ("too new" if new else None)


def test_the_models_tell_inputs_apart(
    image_ensemble: HydraEnsemble, text_ensemble: HydraEnsemble
) -> None:
    for ensemble, inputs in ((image_ensemble, PICTURES), (text_ensemble, TEXTS)):
        answer = ensemble.predict(inputs)
        assert float(answer.probabilities.std(0).max()) > 0.005
        assert float(answer.mutual_information.min()) > 1e-5


def test_pictures_by_form_file_and_base64(
    images: TestClient, image_ensemble: HydraEnsemble
) -> None:
    files = [("file", (f"../{i}.png", png(p), "image/png")) for i, p in enumerate(PICTURES)]
    got = images.post("/predict", files=files)
    assert got.status_code == 200, got.text
    assert got.json()["model"] == "tiny"
    same(got.json()["answers"], image_ensemble, PICTURES)
    got = images.post("/predict", content=png(PICTURES[1]), headers={"content-type": "image/png"})
    same(got.json()["answers"], image_ensemble, PICTURES[1:2])
    coded = [base64.b64encode(png(p)).decode() for p in PICTURES]
    same(
        images.post("/predict", json={"images": coded}).json()["answers"], image_ensemble, PICTURES
    )
    same(
        images.post("/predict", json={"image": coded[0]}).json()["answers"],
        image_ensemble,
        PICTURES[:1],
    )


def test_texts_by_json_form_and_plain(texts: TestClient, text_ensemble: HydraEnsemble) -> None:
    same(texts.post("/predict", json={"texts": TEXTS}).json()["answers"], text_ensemble, TEXTS)
    one = texts.post("/predict", json={"text": TEXTS[0]}).json()["answers"]
    same(one, text_ensemble, TEXTS[:1])
    form = texts.post("/predict", files=[("text", (None, text)) for text in TEXTS])
    same(form.json()["answers"], text_ensemble, TEXTS)
    plain = texts.post("/predict", content=TEXTS[2], headers={"content-type": "text/plain"})
    same(plain.json()["answers"], text_ensemble, TEXTS[2:])


def test_all_probabilities_on_demand(texts: TestClient, text_ensemble: HydraEnsemble) -> None:
    got = texts.post("/predict?probabilities=1", json={"text": TEXTS[0]}).json()["answers"][0]
    expected = text_ensemble.predict(TEXTS[:1]).probabilities[0]
    np.testing.assert_allclose(got["probabilities"], expected, atol=1e-5)


def test_why_new_with_the_nearest_known(texts: TestClient, text_ensemble: HydraEnsemble) -> None:
    got = texts.post("/predict?why=1", json={"text": "great story very bad"}).json()["answers"][0]
    batch = dict(text_ensemble.tokenizer(["great story very bad"], return_tensors="pt"))
    evidence = text_ensemble.why_novel(batch)
    assert [near["name"] for near in got["evidence"]["nearest"]] == [
        evidence.names[i] for i in evidence.neighbours[0].tolist()
    ]
    assert got["evidence"]["nearest"][0] == {
        "position": evidence.names.index("great story very bad"),
        "name": "great story very bad",
        "similarity": 1.0,
    }
    assert [term["term"] for term in got["evidence"]["terms"]] == [
        term for term, _ in evidence.strongest(0)
    ]


def test_the_alarm_level_and_the_policy_decide(image_ensemble: HydraEnsemble) -> None:
    noise = {"images": [base64.b64encode(png(p)).decode() for p in PICTURES]}
    with client_of(image_ensemble, alarm=0.999) as client:
        answers = client.post("/predict", json=noise).json()["answers"]
        assert [answer["why"] for answer in answers] == ["too new"] * 3
    middle = sum(sorted(answer["uncertainty"] for answer in answers)[:2]) / 2
    policy = hydra.Policy(threshold=middle, score=image_ensemble.score)
    image_ensemble.policy = policy
    try:
        with client_of(image_ensemble) as client:
            answers = client.post("/predict", json=noise).json()["answers"]
            for answer in answers:
                unsure = not answer["uncertainty"] <= policy.threshold
                assert answer["decision"] == ("unsure" if unsure else "answer")
                assert answer["why"] == ("too unsure" if unsure else None)
            told = client.get("/v2/models/tiny").json()["parameters"]["rule"]
            assert told == str(policy)
    finally:
        image_ensemble.policy = None
