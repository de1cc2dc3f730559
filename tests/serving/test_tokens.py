"""Who must send a token, which ones are taken, and which paths stay open."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hydra_ensembles.cli.main import main
from hydra_ensembles.errors import DataError
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.serving.tokens import is_loopback, read_tokens
from tests.serving.running_server import START, Server, serving

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def token_file(folder: Path, text: str = f"{OLD}\n\n  {NEW}  \n", mode: int = 0o600) -> Path:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(mode)
    return file


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def films(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = token_file(tmp_path_factory.mktemp("tokens"))
    options = ("--host", "0.0.0.0", "--token-file", str(file))
    with serving(saved / "films", *options) as server:
        server.address = server.address.replace("0.0.0.0", "127.0.0.1")
        yield server


@pytest.mark.parametrize("token", [OLD, NEW])
def test_every_token_of_the_file_opens_everything(films: Server, token: str) -> None:
    headers = bearer(token)
    for path in ("/facts", "/metrics", "/v2", "/v2/models/films", "/v2/models/films/ready"):
        assert httpx.get(films.url + path, headers=headers).status_code == 200, path
    answer = httpx.post(f"{films.url}/predict", json={"text": "bad"}, headers=headers)
    assert answer.status_code == 200 and answer.json()["answers"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong-token-0123456789"),
        bearer(OLD[:-1]),
        bearer(OLD + "0"),
        {"authorization": "Bearer"},
        {"authorization": OLD},
        {"authorization": f"Basic {OLD}"},
        {"x-token": OLD},
        [("authorization", f"Bearer {OLD}"), ("authorization", "Bearer other")],
    ],
)
def test_without_a_valid_token_nothing_is_answered(films: Server, headers: Any) -> None:
    for path in ("/facts", "/metrics", "/v2", "/v2/models/films", "/nothing", "//", "/v2/health"):
        answer = httpx.get(films.url + path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert list(answer.json()) == ["error"]
    for path in ("/predict", "/v2/models/films/infer"):
        answer = httpx.post(films.url + path, json={"text": "bad"}, headers=headers)
        assert answer.status_code == 401 and "Authorization: Bearer" in answer.json()["error"]


def test_the_page_and_health_stay_open_and_tell_nothing(films: Server) -> None:
    assert httpx.get(f"{films.url}/v2/health/live").json() == {"live": True}
    assert httpx.get(f"{films.url}/v2/health/ready").json() == {"ready": True}
    page = httpx.get(f"{films.url}/")
    assert page.status_code == 200 and "films" not in page.text and "awful" not in page.text
    assert httpx.get(f"{films.url}/?token={OLD}").text == page.text


def test_a_triton_client_passes_the_header(films: Server, text_ensemble: HydraEnsemble) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(films.address)
    try:
        tensor = triton.InferInput("text", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"a very good film"], dtype=np.object_))
        answer = client.infer("films", [tensor], headers=bearer(NEW))
        expected = text_ensemble.predict(["a very good film"])
        np.testing.assert_allclose(
            answer.as_numpy("probabilities"), expected.probabilities, rtol=1e-4, atol=1e-5
        )
        with pytest.raises(triton.InferenceServerException, match="valid token"):
            client.infer("films", [tensor])
    finally:
        client.close()


def test_other_machines_need_a_token_or_a_gateway(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", str(saved / "films"), "--host", "0.0.0.0"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "--token-file" in told and "--no-token" in told and "secrets.token_urlsafe" in told
    file = token_file(tmp_path)
    assert main([*command, "--token-file", str(file), "--no-token"]) == 2
    assert "not both" in capsys.readouterr().err
    assert main([*command, "--token-file", str(tmp_path / "none")]) == 3
    assert "Cannot read the token file" in capsys.readouterr().err


def test_a_gateway_may_authenticate(saved: Path) -> None:
    with serving(saved / "films", "--host", "0.0.0.0", "--no-token") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.post(f"{url}/predict", json={"text": "bad"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.4", False),
        ("example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_which_addresses_are_loopback(host: str, here: bool) -> None:
    assert is_loopback(host) is here


@pytest.mark.parametrize(
    "text", ["", " \n\n", "short\n", f"{OLD}\nkurz\n", f"{OLD} {NEW}\n", "ü" * 20]
)
def test_files_without_usable_tokens(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="token_urlsafe") as caught:
        read_tokens(token_file(tmp_path, text))
    assert OLD not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_tokens(token_file(tmp_path)) == (OLD.encode(), NEW.encode())
        assert not caplog.records
        read_tokens(token_file(tmp_path, mode=0o644))
    assert "chmod 600" in caplog.text and OLD not in caplog.text


def test_the_warning_is_seen_on_the_command_line(saved: Path, tmp_path: Path) -> None:
    file = token_file(tmp_path, mode=0o644)
    command = [sys.executable, "-c", START, "serve", str(saved / "nothing"), "--token-file"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True)
    assert "chmod 600" in done.stderr
