"""Drive a headless Chromium by its own protocol: open a page, run scripts, choose files."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)


def chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """An open page."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol; return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await asyncio.wait_for(self._socket.receive(), 30)).data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def run(self, script: str) -> Any:
        """Run a script in the page; return its value."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a script is true."""
        end = time.monotonic() + 30
        while not await self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            await asyncio.sleep(0.02)

    async def choose_file(self, selector: str, file: Path) -> None:
        """Choose a file in an input."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    async def screenshot(self, file: Path) -> None:
        """Write a picture of the page."""
        shot = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def opened(url: str, *, size: str = "1100,800") -> AsyncIterator[Page]:
    """Open a page in a new browser with an empty profile."""
    import aiohttp

    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            told = Path(profile) / "DevToolsActivePort"
            end = time.monotonic() + 30
            while not (told.is_file() and "\n" in told.read_text()):
                assert time.monotonic() < end and process.poll() is None, "Chromium does not start"
                await asyncio.sleep(0.02)
            port = told.read_text().split()[0]
            with urlopen(f"http://127.0.0.1:{port}/json") as answer:
                target = next(t for t in json.load(answer) if t["type"] == "page")
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket,
            ):
                page = Page(socket)
                await page.call("Page.navigate", url=url)
                await page.until(
                    "document.readyState === 'complete' && location.href !== 'about:blank'"
                )
                yield page
        finally:
            process.terminate()
            process.wait(timeout=30)
