"""Open Inference Protocol v2: metadata, health, JSON and binary tensors."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from hydra_ensembles.fusion.ensemble import HydraEnsemble
from tests.serving.conftest import picture, png

HEADER = "Inference-Header-Content-Length"
INFER = "/v2/models/tiny/infer"
TEXTS = ["a very good film", "bad", "a dull dull story films"]


def by_name(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {output["name"]: output for output in response.json()["outputs"]}


def test_metadata_and_health(texts: TestClient, images: TestClient) -> None:
    assert texts.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"):
        assert texts.get(path).status_code == 200, path
    model = texts.get("/v2/models/tiny/versions/1").json()
    assert [i["name"] for i in model["inputs"]] == [
        *("text", "text_pair", "input_ids", "token_type_ids", "attention_mask")
    ]
    assert model["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
    assert {o["name"]: o["datatype"] for o in model["outputs"]} == {
        "label": "BYTES",
        "class": "INT64",
        "confidence": "FP32",
        "uncertainty": "FP32",
        "mutual_information": "FP32",
        "disagreement": "FP32",
        "novelty": "FP32",
        "novelty_score": "FP32",
        "decision": "BYTES",
        "why": "BYTES",
        "probabilities": "FP32",
        "member_logits": "FP32",
    }
    pixels = images.get("/v2/models/tiny").json()["inputs"][1]
    assert pixels == {"name": "pixel_values", "datatype": "FP32", "shape": [-1, 1, 16, 16]}
    for path in ("/v2/models/other", "/v2/models/tiny/versions/2", "/v2/models/other/ready"):
        assert texts.get(path).status_code == 404, path


def test_texts_in_json(texts: TestClient, text_ensemble: HydraEnsemble) -> None:
    request = {
        "id": "seven",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [3], "data": TEXTS}],
    }
    response = texts.post(INFER, json=request)
    outputs = by_name(response)
    head = response.json()
    assert (head["model_name"], head["model_version"], head["id"]) == ("tiny", "1", "seven")
    expected = text_ensemble.predict(TEXTS)
    assert outputs["class"]["data"] == expected.class_index.tolist()
    assert outputs["label"]["data"] == expected.labels
    for name in ("probabilities", "member_logits", "novelty", "uncertainty"):
        column = getattr(expected, name)
        assert outputs[name]["shape"] == list(column.shape)
        np.testing.assert_allclose(
            outputs[name]["data"], column.flatten(), rtol=1e-4, atol=1e-6, err_msg=name
        )
    new = (expected.novelty > 0.95).tolist()
    assert outputs["decision"]["data"] == ["new" if one else "answer" for one in new]
    assert outputs["why"]["data"] == ["too new" if one else "" for one in new]


def test_only_the_outputs_that_were_asked_for(texts: TestClient) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["bad"]}
    wanted = [{"name": "novelty"}, {"name": "label"}]
    outputs = by_name(texts.post(INFER, json={"inputs": [tensor], "outputs": wanted}))
    assert list(outputs) == ["novelty", "label"]
    refused = texts.post(INFER, json={"inputs": [tensor], "outputs": [{"name": "mood"}]})
    assert refused.status_code == 422 and "'mood'" in refused.json()["error"]


def test_token_tensors_equal_texts(texts: TestClient, text_ensemble: HydraEnsemble) -> None:
    tokens = text_ensemble.tokenizer(TEXTS, padding=True, return_tensors="np")
    inputs = [
        {"name": k, "datatype": "INT64", "shape": list(v.shape), "data": v.tolist()}
        for k, v in tokens.items()
    ]
    outputs = by_name(texts.post(INFER, json={"inputs": inputs}))
    expected = text_ensemble.predict(TEXTS)
    np.testing.assert_allclose(
        outputs["probabilities"]["data"], expected.probabilities.flatten(), atol=1e-5
    )


def test_binary_in_binary_out(images: TestClient, image_ensemble: HydraEnsemble) -> None:
    pictures = [picture(seed) for seed in range(2)]
    transform = image_ensemble.transform
    pixels = np.stack([transform(p).numpy() for p in pictures])
    data = pixels.astype("<f4").tobytes()
    head = {
        "inputs": [
            {
                "name": "pixel_values",
                "datatype": "FP32",
                "shape": [2, 1, 16, 16],
                "parameters": {"binary_data_size": len(data)},
            }
        ],
        "outputs": [
            {"name": "probabilities", "parameters": {"binary_data": True}},
            {"name": "class"},
            {"name": "label", "parameters": {"binary_data": True}},
        ],
    }
    text = json.dumps(head).encode()
    response = images.post(INFER, content=text + data, headers={HEADER: str(len(text))})
    assert response.status_code == 200, response.text
    length = int(response.headers[HEADER])
    told, rest = json.loads(response.content[:length]), response.content[length:]
    first, second, third = told["outputs"]
    size = first["parameters"]["binary_data_size"]
    expected = image_ensemble.predict(pictures)
    np.testing.assert_allclose(
        np.frombuffer(rest[:size], "<f4").reshape(2, 10), expected.probabilities, atol=1e-5
    )
    assert second["data"] == expected.class_index.tolist()
    names = [label.encode() for label in expected.labels]
    assert rest[size:] == b"".join(struct.pack("<I", len(name)) + name for name in names)
    assert third["parameters"]["binary_data_size"] == len(rest) - size


def test_files_of_pictures_as_bytes(images: TestClient, image_ensemble: HydraEnsemble) -> None:
    pictures = [picture(seed) for seed in range(2)]
    files = [png(p) for p in pictures]
    tensor: dict[str, Any] = {"name": "image", "datatype": "BYTES", "shape": [2]}
    coded = [base64.b64encode(content).decode() for content in files]
    outputs = by_name(images.post(INFER, json={"inputs": [{**tensor, "data": coded}]}))
    expected = image_ensemble.predict(pictures).labels
    assert outputs["label"]["data"] == expected
    data = b"".join(struct.pack("<I", len(content)) + content for content in files)
    tensor["parameters"] = {"binary_data_size": len(data)}
    text = json.dumps({"inputs": [tensor]}).encode()
    outputs = by_name(images.post(INFER, content=text + data, headers={HEADER: str(len(text))}))
    assert outputs["label"]["data"] == expected


def ids(**changed: Any) -> dict[str, Any]:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [[2, 6, 3]]}
    return {"inputs": [{**tensor, **changed}]}


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({}, 422, "no list of 'inputs'"),
        ({"inputs": []}, 422, "no list of 'inputs'"),
        ({"inputs": [3]}, 422, "not an object with a 'name'"),
        (ids(datatype="FP128"), 422, "'FP128'; expected"),
        (ids(shape=[1, -3]), 422, "whole numbers"),
        (ids(shape=[2**31, 2]), 422, "whole numbers"),
        (ids(shape="3"), 422, "whole numbers"),
        (ids(shape=[1, 4]), 422, "has 3 values; its shape"),
        (ids(shape=[2147483647, 2147483647]), 422, "has 3 values"),
        (ids(data=[[1], [2, 3]]), 422, "ragged"),
        (ids(data=["a", "b", "c"]), 422, "not values of INT64"),
        (ids(data=[1.5, 2, 3]), 422, "not values of INT64"),
        (ids(datatype="UINT8", data=[1, 2, 300]), 422, "do not fit into UINT8"),
        (ids(data=[2**70, 2, 3]), 422, "not values of INT64"),
        (ids(data=[{}, 2, 3]), 422, "not values of INT64"),
        (ids(shape=[3]), 422, "has the shape [3]; expected"),
        (ids(shape=[0, 3], data=[]), 422, "any number from 1 on"),
        (ids(name="pixels"), 422, "expected either 'text' or 'input_ids'"),
        (ids(data=[999, 999, 999]), 422, "could not answer this input"),
        (ids(data=[-1, 2, 3]), 422, "could not answer this input"),
        (ids(parameters={"shared_memory_region": "x"}), 422, "Shared memory"),
        (ids(parameters={"binary_data_size": 3}), 400, "0 bytes are left"),
        (ids(parameters=[1]), 422, "not an object"),
        ({"inputs": ids()["inputs"] * 2}, 422, "Two inputs"),
        ({**ids(), "outputs": {"name": "label"}}, 422, "not a list"),
        (
            {**ids(), "outputs": [{"name": "label", "parameters": {"classification": 3}}]},
            422,
            "not",
        ),
    ],
)
def test_wrong_tensors_are_refused_in_words(
    texts: TestClient, request_: dict[str, Any], status: int, words: str
) -> None:
    response = texts.post(INFER, json=request_)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]
    assert "Traceback" not in response.text and ".py" not in response.text


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (b'{"inputs": []}', "99", "expected the length of the JSON"),
        (b'{"inputs": []}', "minus one", "expected the length of the JSON"),
        (b'{"inputs": []}', "\u00b2", "expected the length of the JSON"),
        (b'{"inputs": []}', "9" * 5000, "expected the length of the JSON"),
        (b'{"inputs": [', "12", "not JSON"),
        (b"\xff\xfe", "2", "not JSON"),
    ],
)
def test_wrong_binary_requests(texts: TestClient, body: bytes, length: str, words: str) -> None:
    response = texts.post(
        INFER, content=body, headers=[(HEADER.encode(), length.encode("latin-1"))]
    )
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_binary_data_that_are_cut_off_or_left_over(texts: TestClient) -> None:
    def send(size: int, data: bytes, datatype: str = "BYTES", shape: Any = (1,)) -> Any:
        tensor = {
            "name": "text",
            "datatype": datatype,
            "shape": list(shape),
            "parameters": {"binary_data_size": size},
        }
        text = json.dumps({"inputs": [tensor]}).encode()
        return texts.post(INFER, content=text + data, headers={HEADER: str(len(text))})

    assert send(7, struct.pack("<I", 3) + b"bad").status_code == 200
    assert "cut off" in send(7, struct.pack("<I", 9) + b"bad").json()["error"]
    assert "cut off" in send(2, b"ab").json()["error"]
    assert "belong to no input" in send(7, struct.pack("<I", 3) + b"badxx").json()["error"]
    assert "not UTF-8" in send(6, struct.pack("<I", 2) + b"\xff\xff").json()["error"]
    assert "has 5 bytes" in send(5, b"12345", "INT64").json()["error"]
    assert "tensor of BYTES" in send(8, b"12345678", "INT64").json()["error"]
