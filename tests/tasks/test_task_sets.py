"""Sets of every task where torch is not: exported programs and the service give the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble, runtime
from tests.tasks.test_task_doors import items, named, same
from tests.tasks.test_task_doors import saved as saved_to

LIMIT = {"labels": 0.5, "tags": 0.9, "questions": 0.97, "number": 1.3, "numbers": 1.3}


def with_sets(name: str, folder: Path) -> HydraEnsemble:
    """An ensemble with sets whose thresholds leave some in and some out."""
    made = HydraEnsemble.from_pretrained(saved_to(name, folder))
    columns = {"number": 1, "numbers": 3}.get(name, 1)
    numbers = name.startswith("number")
    made.sets = hydra.Sets(
        "normalised" if numbers else "lac",
        0.9,
        thresholds=((LIMIT[name],) * columns,),
        counts=((50,) * columns,),
        examples=50,
        scale=((0.4, 2.0, 0.1),) * columns if numbers else (),
        longest=30 if name == "questions" else 0,
    )
    return made


@pytest.mark.parametrize("name", list(LIMIT))
def test_exported_and_served_sets_are_those_of_the_ensemble(name: str, tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime", "httpx", "starlette"):
        pytest.importorskip(package)
    from starlette.testclient import TestClient

    from hydra_ensembles.serving.app import make_app
    from hydra_ensembles.serving.service import Service
    from hydra_ensembles.serving.torch_backend import TorchBackend

    saved_to.cache_clear()
    made = with_sets(name, tmp_path / "saved")
    rows = made.predict(items(name)).rows()
    sets = [row["set"] for row in rows]
    assert all(found is not None for found in sets) and len({str(found) for found in sets}) > 1
    made.export(tmp_path / "exported")
    exported = runtime.load(tmp_path / "exported").predict(items(name)).rows()
    for row, right in zip(exported, sets, strict=True):
        same(row["set"], right, "set")
    app = make_app(Service(TorchBackend(made), "tiny"), version="0")
    body = {"inputs": items(name)} if name == "questions" else {"texts": items(name)}
    with TestClient(app) as served:
        answers = served.post("/predict", json=body).json()["answers"]
        told = served.get("/v2/models/tiny").json()["parameters"]["sets"]
    for row, right in zip(answers, sets, strict=True):
        same(row["set"], right, "set")
    assert told == str(made.sets)
    if named(name) and name == "labels":
        assert {label for found in sets for label in found} <= set(named(name) or [])
