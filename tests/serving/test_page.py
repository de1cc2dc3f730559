"""The page at `/`, in a real browser: a text and a picture are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hydra_ensembles.fusion.ensemble import HydraEnsemble
from tests.serving.browser import chromium, opened
from tests.serving.conftest import client_of, picture
from tests.serving.running_server import serving

in_a_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium")

ANSWER = "document.getElementById('answer').innerText"
STATE = "document.body.dataset.state"


def test_the_page_needs_nothing_from_elsewhere(texts: TestClient) -> None:
    response = texts.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "http://" not in response.text and "https://" not in response.text


def test_names_of_classes_are_data_and_not_part_of_the_page(image_ensemble: HydraEnsemble) -> None:
    names = image_ensemble.id2label
    image_ensemble.id2label = ["</script><script>alert(1)</script>", *"123456789"]
    try:
        with client_of(image_ensemble) as client:
            page, facts = client.get("/"), client.get("/facts")
    finally:
        image_ensemble.id2label = names
    assert "alert" not in page.text and "innerHTML" not in page.text
    assert facts.headers["content-type"] == "application/json"
    assert facts.headers["x-content-type-options"] == "nosniff"
    assert facts.json()["classNames"][0].startswith("</script>")


@in_a_browser
def test_the_page_asks_for_a_token(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    file = tmp_path / "tokens"
    file.write_text("a-token-of-the-page\n")
    file.chmod(0o600)

    async def look(url: str) -> str:
        async with opened(url) as page:
            await page.until(f"{STATE} === 'locked'")
            await page.run("document.getElementById('token').value = 'a-token-of-the-page'")
            await page.run("document.getElementById('locked').requestSubmit()")
            await page.until(f"{STATE} === 'open'")
            await page.run("document.getElementById('text').value = 'bad'")
            await page.run("document.getElementById('send').click()")
            await page.until(f"{STATE} === 'answered'")
            return await page.run(ANSWER)

    with serving(saved / "films", "--token-file", str(file)) as server:
        assert "Novelty" in asyncio.run(look(server.url))


@in_a_browser
def test_a_text_is_answered(saved: Path) -> None:
    pytest.importorskip("aiohttp")

    async def look(url: str) -> dict[str, Any]:
        async with opened(url) as page:
            await page.until(f"{STATE} === 'open'")
            await page.run("document.getElementById('text').value = 'great story very bad'")
            await page.run("document.getElementById('send').click()")
            await page.until(f"{STATE} === 'answered'")
            seen = {"answer": await page.run(ANSWER)}
            await page.run("document.getElementById('text').value = 'x '.repeat(20000)")
            await page.run("document.getElementById('send').click()")
            await page.until(f"{STATE} === 'failed'")
            return {**seen, "refused": await page.run(ANSWER)}

    with serving(saved / "films") as server:
        seen = asyncio.run(look(server.url))
    assert "NEAREST KNOWN EXAMPLES\ngreat story very bad\n1.00" in seen["answer"]
    assert any(name in seen["answer"] for name in ("awful", "good", "mixed"))
    assert "Novelty" in seen["answer"] and "Uncertainty" in seen["answer"]
    assert "A text has 40000 characters; at most 20000 are read" in seen["refused"]


@in_a_browser
def test_a_picture_is_answered(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    picture(3).save(tmp_path / "noise.png")

    async def look(url: str) -> dict[str, Any]:
        async with opened(url) as page:
            await page.until(f"{STATE} === 'open'")
            await page.choose_file("#file", tmp_path / "noise.png")
            await page.until(f"{STATE} === 'answered'")
            return {
                "answer": await page.run(ANSWER),
                "shown": await page.run("document.querySelector('#shown img').naturalWidth"),
                "bars": await page.run("document.querySelectorAll('.fill').length"),
            }

    with serving(saved / "digits", "--alarm", "0.9") as server:
        seen = asyncio.run(look(server.url))
    assert "new to me" in seen["answer"] and "digit" in seen["answer"]
    assert "known " in seen["answer"]
    assert seen["shown"] == 24 and seen["bars"] == 8
