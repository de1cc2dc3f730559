"""The command itself: a process, real sockets, a real Triton client, slow clients, signals."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hydra_ensembles.cli.main import main
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from tests.serving.conftest import picture, png
from tests.serving.running_server import Server, serving

TEXTS = ["a very good film", "bad", "a dull dull story films"]


@pytest.fixture(scope="module")
def films(saved: Path) -> Iterator[Server]:
    with serving(saved / "films", "--read-timeout", "0.5", "--max-wait", "300") as server:
        yield server


@pytest.fixture(scope="module")
def digits(saved: Path) -> Iterator[Server]:
    with serving(saved / "digits", "--name", "numbers") as server:
        yield server


def test_a_triton_client_sends_texts(films: Server, text_ensemble: HydraEnsemble) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(films.address)
    try:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("films") and not client.is_model_ready("other")
        assert client.get_server_metadata()["name"] == "hydra-ensembles"
        outputs = [o["name"] for o in client.get_model_metadata("films")["outputs"]]
        tensor = triton.InferInput("text", [3], "BYTES")
        tensor.set_data_from_numpy(np.array([t.encode() for t in TEXTS], dtype=np.object_))
        answer = client.infer("films", [tensor])  # all outputs, binary
        expected = text_ensemble.predict(TEXTS)
        assert answer.as_numpy("class").tolist() == expected.class_index.tolist()
        for name in ("probabilities", "uncertainty", "novelty", "novelty_score", "member_logits"):
            np.testing.assert_allclose(
                answer.as_numpy(name), getattr(expected, name), rtol=1e-4, atol=1e-5, err_msg=name
            )
        assert [name.decode() for name in answer.as_numpy("label")] == expected.labels
        assert all(answer.as_numpy(name) is not None for name in outputs)
        with pytest.raises(triton.InferenceServerException, match="There is no output 'mood'"):
            client.infer("films", [tensor], outputs=[triton.InferRequestedOutput("mood")])
    finally:
        client.close()


def test_a_triton_client_sends_pixels_and_files(
    digits: Server, image_ensemble: HydraEnsemble
) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(digits.address)
    try:
        pictures = [picture(seed) for seed in range(2)]
        expected = image_ensemble.predict(pictures)
        pixels = np.stack([image_ensemble.transform(p).numpy() for p in pictures])
        tensor = triton.InferInput("pixel_values", list(pixels.shape), "FP32")
        tensor.set_data_from_numpy(pixels, binary_data=True)
        files = triton.InferInput("image", [2], "BYTES")
        files.set_data_from_numpy(np.array([png(p) for p in pictures], dtype=np.object_))
        wanted = [
            triton.InferRequestedOutput("probabilities", binary_data=True),
            triton.InferRequestedOutput("novelty", binary_data=False),
        ]
        for given in (tensor, files):
            answer = client.infer("numbers", [given], outputs=wanted, request_id="7")
            assert answer.get_response()["id"] == "7"
            for name in ("probabilities", "novelty"):
                np.testing.assert_allclose(
                    answer.as_numpy(name), getattr(expected, name), rtol=1e-4, atol=1e-5
                )
    finally:
        client.close()


def test_waiting_requests_are_answered_together(films: Server) -> None:
    def batches() -> float:
        text = httpx.get(f"{films.url}/metrics").text
        line = next(t for t in text.splitlines() if t.startswith("hydra_batch_rows_count"))
        return float(line.split()[1])

    before, got = batches(), []
    threads = [
        threading.Thread(
            target=lambda: got.append(httpx.post(f"{films.url}/predict", json={"text": "bad"}))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.status_code for r in got] == [200] * 8
    assert batches() - before < 8


def dribble(server: Server, parts: list[bytes], pause: float) -> bytes:
    """Send parts with pauses; return what comes back until the connection ends."""
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except OSError:
            pass
        chunks = []
        try:
            while chunk := connection.recv(4096):
                chunks.append(chunk)
        except ConnectionResetError:
            pass
        return b"".join(chunks)


def test_slow_clients_are_cut_off_or_wait_alone(films: Server) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
    body = dribble(films, [head, *[b"x"] * 8], 0.1)
    assert body.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 seconds" in body
    address = films.address.partition(":")
    slow = [socket.create_connection((address[0], int(address[2]))) for _ in range(100)]
    try:
        for number, connection in enumerate(slow):  # half a header each, then silence
            connection.sendall(b"GET / HTTP/1.1\r\na: "[: 1 + number % 20])
        assert httpx.post(f"{films.url}/predict", json={"text": "bad"}).status_code == 200
    finally:
        for connection in slow:
            connection.close()
    assert dribble(films, [b"nonsense\r\n\r\n"], 0).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{films.url}/v2/health/ready").status_code == 200


@pytest.mark.parametrize("size", [66_000, 100_000, 130_000, 250_000])
def test_headers_have_a_limit_also_in_one_burst(films: Server, size: int) -> None:
    head = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\na: %s\r\n\r\n" % (b"b" * size)
    assert dribble(films, [head], 0)[9:12] in (b"431", b"400")
    path = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % (b"b" * size)
    assert dribble(films, [path], 0)[9:12] in (b"431", b"400")


def test_headers_that_never_end_are_cut_off(films: Server) -> None:
    flood = dribble(films, [b"GET / HTTP/1.1\r\n", *[b"a: " + b"b" * 10_000 + b"\r\n"] * 200], 0)
    assert flood == b"" or flood.startswith(b"HTTP/1.1 400")


BODY = b"x" * 40_000_000


def by_urllib(url: str, *, chunked: bool = False) -> int:
    parts = (BODY[:100_000] for _ in range(400)) if chunked else BODY
    try:
        with urllib.request.urlopen(urllib.request.Request(url, parts), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def by_httpx(url: str, *, chunked: bool = False) -> int:
    parts = (BODY[:100_000] for _ in range(400)) if chunked else BODY
    return httpx.post(url, content=parts, timeout=20).status_code


@pytest.mark.parametrize("send", [by_urllib, by_httpx])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_refused_body_is_read_away_so_that_the_client_sees_why(
    digits: Server, send: Any, chunked: bool
) -> None:
    assert send(f"{digits.url}/predict", chunked=chunked) == 413
    assert send(f"{digits.url}/nothing", chunked=chunked) == 404


def test_a_body_that_nobody_wants_cannot_hold_a_connection(films: Server) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n"
    answer = dribble(films, [head], 0)  # returns when the service closes the connection
    assert answer.startswith(b"HTTP/1.1 404")


def test_a_signal_lets_requests_finish(saved: Path) -> None:
    with serving(saved / "films", "--max-wait", "1500") as server:
        got: list[Any] = []
        request = threading.Thread(
            target=lambda: got.append(httpx.post(f"{server.url}/predict", json={"text": "bad"}))
        )
        request.start()
        while "hydra_queue_rows 1.0" not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.01)
        code, said = server.stop()
        request.join()
        assert got[0].status_code == 200 and got[0].json()["answers"][0]["label"]
        assert code == 0, said
        assert "every request under way was answered" in said and "Traceback" not in said


def test_what_cannot_be_served(saved: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", str(tmp_path / "nothing")]) == 3
    assert "There is no folder" in capsys.readouterr().err
    assert main(["serve", str(saved / "films"), "--alarm", "7"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(saved / "films"), "--port", port]) == 3
    assert f"Cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err
