"""An exported ensemble is served without torch, with the answers of the ensemble itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from hydra_ensembles.cli.main import main
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from tests.serving.running_server import NO_TORCH, serving

TEXTS = ["a very good film", "bad", "a dull dull story films"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, text_ensemble: HydraEnsemble) -> Path:
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("exported") / "films"
    text_ensemble.export(folder)
    return folder


def test_an_exported_ensemble_answers_without_torch(
    exported: Path, text_ensemble: HydraEnsemble
) -> None:
    expected = text_ensemble.predict(TEXTS)
    assert expected.novelty is not None
    with serving(exported, "--threads", "1", start=NO_TORCH) as server:
        answers = httpx.post(f"{server.url}/predict?why=1", json={"texts": TEXTS}).json()["answers"]
        model = httpx.get(f"{server.url}/v2/models/films").json()
        metrics = httpx.get(f"{server.url}/metrics").text
        facts = httpx.get(f"{server.url}/facts").json()
        code, said = server.stop()
    assert model["platform"] == "hydra_ensembles_onnx"
    assert model["inputs"][0]["name"] == "text"
    for i, answer in enumerate(answers):
        assert answer["class"] == int(expected.class_index[i])
        assert answer["label"] == (text_ensemble.id2label or {})[answer["class"]]
        assert answer["confidence"] == pytest.approx(float(expected.confidence[i]), abs=1e-4)
        assert answer["novelty"] == pytest.approx(float(expected.novelty[i]), abs=0.03)
        assert (answer["decision"] == "new") is (float(expected.novelty[i]) > 0.95)
    assert answers[0]["evidence"] is None
    assert "hydra_novelty_count 3.0" in metrics and "hydra_ensembles_onnx" in metrics
    assert facts["name"] == "films" and facts["reads"] == "text"
    assert code == 0, said


def test_what_an_export_has_fixed_cannot_be_changed(exported: Path, capsys: Any) -> None:
    assert main(["serve", str(exported), "--alarm", "0.1"]) == 2
    assert "export it again" in capsys.readouterr().err
    (exported / "contract.json").write_text("{")
    assert main(["serve", str(exported)]) == 5
    assert "contract.json" in capsys.readouterr().err
