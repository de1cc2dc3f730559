"""What is too large, broken, too slow or too much is refused in plain words, and nothing leaks."""

from __future__ import annotations

import base64
import io
import logging
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.serving.limits import Limits
from tests.serving.conftest import client_of, picture, png

SMALL = Limits(body=20_000, pixels=10_000, text=40, rows=3, queue=4, requests=6)


@pytest.fixture(scope="module")
def small_images(image_ensemble: HydraEnsemble) -> Iterator[TestClient]:
    with client_of(image_ensemble, limits=SMALL) as client:
        yield client


@pytest.fixture(scope="module")
def small_texts(text_ensemble: HydraEnsemble) -> Iterator[TestClient]:
    with client_of(text_ensemble, limits=SMALL) as client:
        yield client


def refused(response: Any, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]
    for leak in ("Traceback", ".py", "/home", "/opt", "site-packages", "object at"):
        assert leak not in response.text


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of some hundred bytes that says it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100_000, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def send(client: TestClient, content: bytes) -> Any:
    return client.post("/predict", files={"file": ("x.png", content)})


def test_a_body_that_is_too_large(small_texts: TestClient) -> None:
    refused(small_texts.post("/predict", content=b"x" * 20_001), 413, "larger than 20000 bytes")

    def dribble() -> Iterator[bytes]:  # no length is told
        for _ in range(30):
            yield b"y" * 1000

    refused(small_texts.post("/predict", content=dribble()), 413, "larger than 20000 bytes")


@pytest.mark.parametrize("size", [(101, 100), (60_000, 60_000), (12_000, 12_000)])
def test_decompression_bombs(small_images: TestClient, size: tuple[int, int]) -> None:
    refused(send(small_images, bomb(*size)), 413, "more than 10000 pixels")


def test_pictures_of_a_request_share_the_pixels(small_images: TestClient) -> None:
    one = png(Image.new("L", (70, 70)))
    files = [("file", ("a.png", one)), ("file", ("b.png", one))]
    assert small_images.post("/predict", files=files).status_code == 200
    refused(small_images.post("/predict", files=[*files, files[0]]), 413, "more than 10000 pixels")


@pytest.mark.parametrize(
    "content",
    [
        b"no picture",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        png(picture())[:90],
        bomb(50, 50)[:60],
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    ],
    ids=["words", "postscript", "cut off", "header only", "svg"],
)
def test_broken_and_foreign_pictures(small_images: TestClient, content: bytes) -> None:
    refused(send(small_images, content), 422, "Cannot read the image")
    refused(send(small_images, b""), 422, "empty")


def test_texts_that_are_too_long_or_too_many(small_texts: TestClient) -> None:
    refused(small_texts.post("/predict", json={"text": "a" * 41}), 413, "at most 40 are read")
    refused(small_texts.post("/predict", json={"texts": ["a"] * 4}), 413, "at most 3 are taken")
    form = [("text", (None, "a"))] * 4
    refused(small_texts.post("/predict", files=form), 413, "cannot be read: Too many fields")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b'{"text": NaN}', 400, "NaN is not valid"),
        (b"[" * 15_000, 400, "JSON"),
        (b'{"a":' * 3000, 400, "JSON"),
        (b'{"n": ' + b"9" * 10_000 + b"}", 400, "not JSON"),
        (b"[1]", 422, "a JSON list; expected an object"),
        (b"{}", 422, "one of 'text'"),
        (b'{"text": "a", "texts": []}', 422, "one of 'text'"),
        (b'{"text": 5}', 422, "Found int"),
        (b'{"text": null}', 422, "Found NoneType"),
        (b'{"texts": "a"}', 422, "not a list"),
        (b'{"texts": []}', 422, "no input"),
        (b'{"text": "\\ud800"}', 422, "not valid Unicode"),
        (b'{"image": "AAAA"}', 422, "reads texts, not images"),
    ],
)
def test_malformed_json(small_texts: TestClient, body: bytes, status: int, words: str) -> None:
    headers = {"content-type": "application/json"}
    refused(small_texts.post("/predict", content=body, headers=headers), status, words)


def test_json_of_countless_lists_is_not_read(texts: TestClient) -> None:
    for body in (
        b'{"texts": [' + b"[]," * 200_000 + b"[]]}",
        b'{"a": [' + b"{}," * 300_000 + b"{}]}",
    ):
        headers = {"content-type": "application/json"}
        refused(texts.post("/predict", content=body, headers=headers), 413, "lists and objects")
        refused(texts.post("/v2/models/tiny/infer", content=body), 413, "lists and objects")
    assert texts.post("/predict", json={"text": "[" * 20_000}).status_code == 200


def test_paths_are_texts_and_never_opened(
    small_texts: TestClient, small_images: TestClient, tmp_path: Any
) -> None:
    assert small_texts.post("/predict", json={"text": "/etc/passwd"}).status_code == 200
    path = tmp_path / "a.png"
    picture().save(path)
    refused(small_images.post("/predict", json={"image": str(path)}), 422, "base64")
    refused(small_images.post("/predict", json={"text": str(path)}), 422, "reads images")
    coded = base64.b64encode(str(path).encode()).decode()
    refused(small_images.post("/predict", json={"image": coded}), 422, "Cannot read the image")


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"content-type": "application/xml"}, b"<a/>", 415, "'application/xml' is not read"),
        ({"content-encoding": "gzip"}, b"\x1f\x8b", 415, "packed (gzip)"),
        ({"content-type": "multipart/form-data"}, b"x", 400, "form cannot be read"),
        ({"content-type": "multipart/form-data; boundary=b"}, b"x", 400, "form cannot be read"),
        ({"content-type": "text/plain"}, b"\xff", 422, "not UTF-8"),
    ],
)
def test_other_contents(
    small_texts: TestClient, headers: dict[str, str], body: bytes, status: int, words: str
) -> None:
    refused(small_texts.post("/predict", content=body, headers=headers), status, words)


def test_forms_without_anything_or_with_both(small_images: TestClient) -> None:
    refused(small_images.post("/predict", files={"other": ("a", b"b")}), 422, "no field 'file'")
    both = [("file", ("a.png", png(picture()))), ("text", (None, "a"))]
    refused(small_images.post("/predict", files=both), 422, "one kind")


def test_unknown_paths_and_methods(small_texts: TestClient) -> None:
    refused(small_texts.get("/nothing"), 404, "nothing here")
    refused(small_texts.get("/predict"), 405, "GET is not for this path")
    refused(small_texts.get("/../../etc/passwd"), 404, "nothing here")


class Held:
    """Hold the model until it is let go."""

    def __init__(self, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.busy = threading.Event()
        batcher = client.service.batcher
        predict = batcher._predict

        def slow(rows: Any) -> Any:
            self.busy.set()
            assert self.free.wait(20)
            return predict(rows)

        monkeypatch.setattr(batcher, "_predict", slow)


def in_background(client: TestClient, body: dict[str, Any], into: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(client.post("/predict", json=body)))
    thread.start()
    return thread


def test_a_full_queue_is_refused_and_the_waiting_are_answered(
    text_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(text_ensemble, limits=SMALL) as client:
        held, got = Held(client, monkeypatch), []
        threads = [in_background(client, {"text": "bad"}, got)]
        assert held.busy.wait(10)
        threads += [in_background(client, {"texts": ["a", "bad"]}, got) for _ in range(2)]
        while client.service.batcher.waiting < 4:
            time.sleep(0.005)
        response = client.post("/predict", json={"text": "good"})
        refused(response, 429, "The queue is full: 4 inputs wait and at most 4 may")
        assert response.headers["retry-after"] == "1"
        held.free.set()
        for thread in threads:
            thread.join()
        assert [r.status_code for r in got] == [200, 200, 200]
        assert client.post("/predict", json={"text": "good"}).status_code == 200


def test_too_many_requests_at_once(
    text_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(requests=2)
    with client_of(text_ensemble, limits=limits) as client:
        held, got = Held(client, monkeypatch), []
        threads = [in_background(client, {"text": "bad"}, got) for _ in range(2)]
        while client.app.requests < 2:
            time.sleep(0.005)
        refused(client.post("/predict", json={"text": "bad"}), 429, "More than 2 requests")
        assert client.get("/v2/health/live").status_code == 200
        held.free.set()
        for thread in threads:
            thread.join()
        assert [r.status_code for r in got] == [200, 200]


def test_no_answer_in_time(text_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(text_ensemble, limits=Limits(answer_seconds=0.05)) as client:
        held = Held(client, monkeypatch)
        response = client.post("/predict", json={"text": "bad"})
        refused(response, 503, "no answer within 0.05 seconds")
        held.free.set()
    with client_of(text_ensemble) as client:
        client.service.ready = False
        refused(client.post("/predict", json={"text": "bad"}), 503, "starting or stopping")
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/health/live").status_code == 200


def test_one_bad_input_does_not_spoil_its_batch(
    text_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(text_ensemble, limits=Limits(wait=0.2)) as client:
        good, bad = [2, 6, 3], [2, 999, 3]
        got: dict[int, Any] = {}

        def ask(place: int, ids: list[int]) -> None:
            tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": ids}
            got[place] = client.post("/v2/models/tiny/infer", json={"inputs": [tensor]})

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate([good, bad, good])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[place].status_code for place in range(3)] == [200, 422, 200]
        text = client.get("/metrics").text
        assert "hydra_batch_rows_count 1.0" in text


def test_what_is_unexpected_is_logged_and_not_told(
    text_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(text_ensemble) as client:

        def fail(*_: Any) -> Any:
            raise RuntimeError("secret /etc/shadow")

        monkeypatch.setattr(client.service, "answer", fail)
        with caplog.at_level(logging.ERROR):
            response = client.post("/predict", json={"text": "bad"})
        refused(response, 500, "Something went wrong inside")
        assert "secret" not in response.text
        assert "secret /etc/shadow" in caplog.text


def test_an_animation_counts_its_first_frame(images: TestClient) -> None:
    stream = io.BytesIO()
    frames = [Image.new("L", (16, 16), shade) for shade in (0, 90, 250)]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert send(images, stream.getvalue()).status_code == 200
