"""Who goes into which batch, and that everybody gets the answer to their own input."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hydra_ensembles.prediction import ClassPrediction, Prediction
from hydra_ensembles.serving.batch_queue import Batcher
from hydra_ensembles.serving.limits import Limits, Refusal


def answers_of(rows: Sequence[Any]) -> Prediction:
    """Answer each row by its size, so that mixed-up answers are found."""
    sizes = [len(row) if isinstance(row, str) else int(row["x"].sum()) for row in rows]
    ones = np.ones(len(rows), dtype=np.float32)
    return ClassPrediction(
        class_index=np.array(sizes),
        probabilities=np.stack([ones, 0 * ones], 1),
        uncertainty=ones,
        mutual_information=ones,
        disagreement=ones,
        member_logits=np.zeros((len(rows), 1, 2), dtype=np.float32),
        code=np.zeros(len(rows), dtype=np.int64),
    )


def run(limits: Limits, requests: list[list[Any]]) -> tuple[list[list[Any]], list[list[int]]]:
    """Send requests at once; return the batches that were made and the labels of each request."""
    batches: list[list[Any]] = []

    def predict(rows: Sequence[Any]) -> Prediction:
        batches.append(list(rows))
        return answers_of(rows)

    async def go() -> list[list[int]]:
        batcher = Batcher(predict, limits)
        batcher.start()
        got = await asyncio.gather(*(batcher.answer(rows) for rows in requests))
        await batcher.close()
        assert batcher.waiting == 0
        return [answers.class_index.tolist() for answers in got]

    return batches, asyncio.run(go())


def test_requests_share_a_batch_and_large_ones_span_several() -> None:
    requests = [["a"], ["bb", "ccc"], ["d" * n for n in range(4, 9)]]
    batches, labels = run(Limits(batch=4), requests)
    assert labels == [[1], [2, 3], [4, 5, 6, 7, 8]]
    assert [len(batch) for batch in batches] == [4, 4]


def test_the_oldest_goes_with_those_of_its_length() -> None:
    texts = ["x" * n for n in (10, 90, 11, 95, 9, 12, 88, 50)]
    batches, labels = run(Limits(batch=4), [[text] for text in texts])
    assert [sorted(map(len, batch)) for batch in batches] == [[9, 10, 11, 12], [50, 88, 90, 95]]
    assert labels == [[len(text)] for text in texts]


def test_kinds_do_not_mix() -> None:
    small, large = {"x": np.ones(2)}, {"x": np.ones(3)}
    batches, labels = run(Limits(), [[small], [large], ["text"], [small], [large]])
    assert labels == [[2], [3], [4], [2], [3]]
    assert sorted(len(batch) for batch in batches) == [1, 2, 2]


def test_nobody_waits_for_a_request_that_gave_up() -> None:
    seen: list[Any] = []

    def predict(rows: Sequence[Any]) -> Prediction:
        seen.extend(rows)
        return answers_of(rows)

    async def go() -> None:
        batcher = Batcher(predict, Limits(wait=0.05))
        batcher.start()
        lost = asyncio.create_task(batcher.answer(["lost"]))
        kept = asyncio.create_task(batcher.answer(["kept"]))
        await asyncio.sleep(0)
        lost.cancel()
        assert (await kept).class_index.tolist() == [4]
        await batcher.close()
        with pytest.raises(Refusal, match="stopping"):
            await batcher.answer(["late"])

    asyncio.run(go())
    assert seen == ["kept"]


def test_counting_that_fails_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no counter")

    async def go() -> list[int]:
        batcher = Batcher(answers_of, Limits(), on_batch=broken)
        batcher.start()
        labels = [int((await batcher.answer(["a" * n])).class_index[0]) for n in (1, 2, 3)]
        await batcher.close()
        return labels

    assert asyncio.run(go()) == [1, 2, 3]
    assert "no counter" in caplog.text
