"""Large inputs take turns: the smallest first, within a budget, and small inputs do not wait."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from PIL import Image

from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.serving import turns as turns_module
from hydra_ensembles.serving.limits import Limits, Refusal
from hydra_ensembles.serving.turns import QUEUE, Turns
from tests.serving.conftest import client_of, picture, png


def finished(sizes: list[int], *, budget: int, places: int) -> tuple[list[int], int, int]:
    """Let work take turns; return the order in which it began, and the most at one time."""
    order: list[int] = []
    now: list[int] = []
    most = most_sum = 0

    async def work(turns: Turns, size: int) -> None:
        nonlocal most, most_sum
        await turns.take(size, 10)
        order.append(size)
        now.append(size)
        most, most_sum = max(most, len(now)), max(most_sum, sum(now))
        for _ in range(3):
            await asyncio.sleep(0)
        now.remove(size)
        turns.give_back(size)

    async def go() -> None:
        turns = Turns(budget, places)
        await asyncio.gather(*(work(turns, size) for size in sizes))

    asyncio.run(go())
    return order, most, most_sum


def test_the_smallest_goes_first_and_the_budget_holds() -> None:
    order, most, most_sum = finished([50, 40, 30, 20, 10], budget=60, places=9)
    assert order == [50, 10, 20, 30, 40]
    assert most == 2 and most_sum == 60
    order, most, _ = finished([50, 40, 30, 20, 10], budget=1000, places=2)
    assert order == [50, 40, 10, 20, 30] and most == 2
    order, most, _ = finished([90, 80], budget=60, places=9)  # larger than the budget: alone
    assert order == [90, 80] and most == 1


def test_what_waits_too_long_or_is_too_much_is_refused() -> None:
    async def go() -> None:
        turns = Turns(100, 1)
        await turns.take(100, 1)
        with pytest.raises(Refusal, match="decoded within") as slow:
            await turns.take(100, 0.01)
        waiting = [asyncio.ensure_future(turns.take(100, 10)) for _ in range(QUEUE)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="Too many") as full:
            await turns.take(1, 10)
        assert slow.value.status == full.value.status == 503
        for task in waiting:
            turns.give_back(100)
            await task

    asyncio.run(go())


def test_a_small_image_overtakes_large_ones(
    image_ensemble: HydraEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = png(Image.new("L", (1200, 1000)))
    free, busy = threading.Event(), []
    monkeypatch.setattr(turns_module, "QUEUE", 4)
    with client_of(image_ensemble, limits=Limits(decoding=1_300_000)) as client:
        prepare = client.service.backend.prepare

        def slow(image: Any) -> Any:
            if image.width == 1200:
                busy.append(1)
                assert free.wait(20)
            return prepare(image)

        monkeypatch.setattr(client.service.backend, "prepare", slow)

        def send(content: bytes) -> Any:
            return client.post("/predict", files={"file": ("x.png", content)})

        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.append(send(large))) for _ in range(5)]
        for thread in threads:
            thread.start()
        while len(client.service._turns._waiting) < 4:
            time.sleep(0.005)
        assert send(png(picture())).status_code == 200
        assert len(busy) == 1, "more than the budget is decoded"
        refused = send(large)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        free.set()
        for thread in threads:
            thread.join()
        assert [response.status_code for response in got] == [200] * 5


def test_bodies_of_all_requests_together_have_a_limit(text_ensemble: HydraEnsemble) -> None:
    with client_of(text_ensemble, limits=Limits(bodies=200_000)) as client:
        client.app.held = 150_000  # as if other requests were under way
        large = client.post("/predict", content=b" " * 100_000)
        assert large.status_code == 503 and large.headers["retry-after"] == "1"
        assert client.post("/predict", json={"text": "bad"}).status_code == 200
        assert client.app.held == 150_000
