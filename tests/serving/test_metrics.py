"""`/metrics` parses by Prometheus's own parser and counts what was said."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.serving.drift_watch import DriftWatch
from hydra_ensembles.serving.metrics import uncertainty_buckets
from hydra_ensembles.uncertainty import Drift
from tests.serving.conftest import client_of


def samples(client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_counts_and_histograms(text_ensemble: HydraEnsemble) -> None:
    with client_of(text_ensemble, alarm=0.4) as client:
        texts = ["a very good film", "bad", "great great great", "a good film bad film"]
        answers = client.post("/predict", json={"texts": texts}).json()["answers"]
        assert client.post("/predict", content=b"{").status_code == 400
        client.get("/nowhere/at/all")
        found = samples(client)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    alarms = sum(answer["novelty"] > 0.6 for answer in answers)
    assert 0 < alarms < 4
    assert value("hydra_alarms_total") == alarms
    assert value("hydra_abstentions_total", why="too new") == alarms
    assert value("hydra_abstentions_total", why="too unsure") == 0
    for name in ("confidence", "uncertainty", "mutual_information", "novelty", "novelty_score"):
        assert value(f"hydra_{name}_count") == 4, name
        total = sum(answer[name] for answer in answers)
        assert value(f"hydra_{name}_sum") == pytest.approx(total, rel=1e-4, abs=1e-5), name
    below = sum(answer["novelty"] <= 0.9 for answer in answers)
    assert value("hydra_novelty_bucket", le="0.9") == below
    assert value("hydra_batch_rows_sum") == 4
    assert value("hydra_requests_total", path="predict", code="200") == 1
    assert value("hydra_requests_total", path="predict", code="400") == 1
    assert value("hydra_requests_total", path="other", code="404") == 1
    assert value("hydra_request_seconds_count", path="predict") == 2
    assert value("hydra_queue_rows") == 0
    assert value("process_resident_memory_bytes") > 0
    assert math.isnan(value("hydra_drift_p_value"))
    facts = next(dict(labels) for name, labels in found if name == "hydra_model_info")
    assert (facts["name"], facts["members"], facts["alarm"]) == ("tiny", "2", "0.4")


def test_the_drift_gauge(text_ensemble: HydraEnsemble) -> None:
    with client_of(text_ensemble, drift_window=36, drift_every=0) as client:
        for text in ["good " * 7, "films films a a a a", "dull dull dull dull dull"] * 12:
            assert client.post("/predict", json={"text": text}).status_code == 200
        end = time.monotonic() + 20
        found = samples(client)
        while math.isnan(found["hydra_drift_p_value", ()]) and time.monotonic() < end:
            time.sleep(0.01)
            found = samples(client)
    assert found["hydra_drift", ()] == 1
    assert found["hydra_drift_p_value", ()] < 0.01
    assert found["hydra_drift_gap", ()] > 0.3
    assert found["hydra_drift_windows_total", (("verdict", "drifted"),)] == 1


def test_windows_like_the_known_data_are_no_drift(text_ensemble: HydraEnsemble) -> None:
    assert text_ensemble.novelty is not None
    known = text_ensemble.novelty.sums.values[0]
    windows: list[Any] = []
    watch = DriftWatch(Drift(text_ensemble, window=36), 36, every=0, on_window=windows.append)
    watch.add(known[:20].tolist())
    watch.add(known[20:].tolist())
    watch.close()
    assert [window.drifted for window in windows] == [False]
    assert windows[0].p > 0.5


def test_rows_between_two_tests_are_not_kept(text_ensemble: HydraEnsemble) -> None:
    windows: list[Any] = []
    watch = DriftWatch(Drift(text_ensemble, window=20), 20, every=3600, on_window=windows.append)
    for _ in range(100):
        watch.add([1.0] * 20)
    watch.close()
    assert len(windows) == 1
    assert len(watch._scores) == 20


def test_buckets_fit_the_score() -> None:
    assert uncertainty_buckets("msp", 10)[-1] == 1
    assert uncertainty_buckets("entropy", 10)[-1] == pytest.approx(math.log(10))
    assert uncertainty_buckets("energy", 10)[0] < 0 < uncertainty_buckets("energy", 10)[-1]
