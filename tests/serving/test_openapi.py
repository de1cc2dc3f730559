"""`/openapi.json` and `/docs`: every example is sent, every answer is checked."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from httpx import Response
from starlette.testclient import TestClient

from hydra_ensembles.serving import openapi
from hydra_ensembles.serving.answer_types import KINDS
from hydra_ensembles.serving.limits import Refusal
from tests.serving.conftest import picture, png
from tests.serving.running_server import serving
from tests.serving.test_page import chromium, in_a_browser, opened

DOCUMENT = openapi.document("0")


def operation(path: str, method: str) -> Any:
    return DOCUMENT["paths"][path][method.lower()]


def check(response: Response, path: str, method: str = "GET") -> Any:
    """Compare an answer with what the document says of its status and its media type."""
    described = operation(path, method)["responses"]
    assert str(response.status_code) in described, (path, response.status_code, response.text)
    content = described[str(response.status_code)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in content, (path, kind)
    if "schema" not in content[kind]:
        return response.text
    schema = {**content[kind]["schema"], "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(response.json())
    return response.json()


def clients(texts: TestClient, images: TestClient) -> dict[str, TestClient]:
    return {"text": texts, "image": images}


def test_it_is_valid_openapi() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**DOCUMENT, "paths": {"predict": {}}})


def test_it_names_every_route_and_every_field(texts: TestClient) -> None:
    routes = texts.app.app.routes  # type: ignore[attr-defined]
    served = {(route.path, m) for route in routes for m in route.methods - {"HEAD"}}
    named = {
        (path, method.upper())
        for path, methods in DOCUMENT["paths"].items()
        for method in methods.keys() & {"get", "post", "put", "delete"}
    }
    assert named == served
    schemas = DOCUMENT["components"]["schemas"]
    for kind in KINDS:
        assert schemas[kind.__name__]["required"] == list(kind.FIELDS)
        assert {"$ref": f"#/components/schemas/{kind.__name__}"} in schemas["Answer"]["anyOf"]
        known = schemas[kind.__name__]["properties"]
        assert all(len(known[name]) > 1 for name in kind.FIELDS), "a field without a type"
    assert texts.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))


def test_statuses_are_those_of_refusals() -> None:
    said = {int(status) for status in re.findall(r"\| (\d+) \|", Refusal.__doc__ or "")}
    assert said | {405, 500} == set(openapi.REFUSALS)


@pytest.mark.parametrize("reads", ["text", "image"])
def test_every_page_answers_as_described(reads: str, texts: TestClient, images: TestClient) -> None:
    client = clients(texts, images)[reads]
    for path, methods in DOCUMENT["paths"].items():
        if "get" in methods:
            asked = path.replace("{model}", "tiny").replace("{version}", "1")
            assert client.get(asked).status_code == 200
            check(client.get(asked), path)
            if "{model}" in path:
                check(client.get(asked.replace("tiny", "other")), path)


@pytest.mark.parametrize("query", ["", "?probabilities=1&why=1"])
@pytest.mark.parametrize("reads", ["text", "image"])
def test_every_example_is_answered_as_described(
    reads: str, query: str, texts: TestClient, images: TestClient
) -> None:
    client, sent = clients(texts, images)[reads], 0
    described = operation("/predict", "POST")["requestBody"]["content"]
    for kind, content in described.items():
        for name, example in content.get("examples", {}).items():
            value, how = example["value"], {"headers": {"content-type": kind}}
            if kind == "multipart/form-data":  # as fields of a form with a boundary
                how = {"files": [(key, (None, one)) for key in value for one in value[key]]}
            elif kind == "application/json":
                schema = {**content["schema"], "components": DOCUMENT["components"]}
                jsonschema.Draft202012Validator(schema).validate(value)
                how["content"] = json.dumps(value)
            else:
                how["content"] = value
            response = client.post(f"/predict{query}", **how)
            answers = check(response, "/predict", "POST")
            assert response.status_code == (200 if name.startswith(reads) else 422), name
            if response.status_code == 200:
                sent += 1
                assert ("probabilities" in answers["answers"][0]) == bool(query)
                count = len(value[name.split()[-1]]) if name.endswith("s") else 1
                assert len(answers["answers"]) == count
    assert sent == (6 if reads == "text" else 2)


@pytest.mark.parametrize("reads", ["text", "image"])
def test_every_example_of_the_protocol_is_answered(
    reads: str, texts: TestClient, images: TestClient
) -> None:
    client = clients(texts, images)[reads]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        path = f"{base}/infer"
        content = operation(path, "POST")["requestBody"]["content"]["application/json"]
        for name, example in content["examples"].items():
            schema = {**content["schema"], "components": DOCUMENT["components"]}
            jsonschema.Draft202012Validator(schema).validate(example["value"])
            asked = path.replace("{model}", "tiny").replace("{version}", "1")
            response = client.post(asked, json=example["value"])
            check(response, path, "POST")
            assert response.status_code == (200 if name == reads else 422)


def test_refusals_are_as_described(texts: TestClient, images: TestClient) -> None:
    def refused(response: Response, status: int) -> None:
        assert response.status_code == status
        check(response, "/predict", "POST")

    headers = {"content-type": "application/json"}
    refused(texts.post("/predict", content="{", headers=headers), 400)
    refused(texts.post("/predict", content="x", headers={"content-type": "video/mp4"}), 415)
    refused(texts.post("/predict", json={"text": "a" * 30_000}), 413)
    refused(images.post("/predict", content=b"x", headers={"content-type": "image/png"}), 422)
    answer = images.post("/predict", content=png(picture()), headers={"content-type": "image/png"})
    check(answer, "/predict", "POST")


def test_a_wrong_answer_fails_the_check(texts: TestClient) -> None:
    response = texts.post("/predict", json={"text": "bad"})
    wrong = response.json()
    wrong["answers"][0]["confidence"] = "high"
    damaged = Response(200, json=wrong)
    with pytest.raises(jsonschema.ValidationError, match="high"):
        check(damaged, "/predict", "POST")


def test_the_page_has_everything_and_loads_nothing(texts: TestClient) -> None:
    response = texts.get("/docs")
    page = response.text
    assert "script" not in page and "http://" not in page and "https://" not in page
    assert response.headers["content-security-policy"] == openapi.PAGE_POLICY
    for path in DOCUMENT["paths"]:
        assert f"{path}</h2>" in page, path
    for name in {name for kind in KINDS for name in kind.FIELDS}:
        assert f"<code>{name}</code>" in page
    assert openapi.GREY in page and openapi.TEXT in page
    assert 'href="docs"' in texts.get("/").text


@in_a_browser
def test_the_page_is_shown_at_the_width_of_a_phone(saved: Any) -> None:
    import asyncio

    pytest.importorskip("aiohttp")
    assert chromium() is not None

    async def look(url: str) -> Any:
        async with opened(url, size="390,844") as page:
            await page.until("document.querySelectorAll('h2').length > 10")
            return await page.run(
                "[document.documentElement.scrollWidth, window.innerWidth, document.title]"
            )

    with serving(saved / "films") as server:
        wide, window, title = asyncio.run(look(f"{server.url}/docs"))
    assert wide <= window and title == "API of hydra-ensembles"
