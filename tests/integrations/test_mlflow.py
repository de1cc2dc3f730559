"""MLflow: logged, loaded and asked again, without a pickle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.errors import DataError
from hydra_ensembles.integrations.mlflow_flavor import predict_frame
from hydra_ensembles.prediction import FIELDS
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import words

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["a good film", "bad films", "a bad film"]


def ensemble(tmp_path: Path) -> hydra.HydraEnsemble:
    made = hydra.fuse(zoo.host("bert"), EARLY)
    made.tokenizer = words(tmp_path)
    made.id2label = ["one", "two", "three", "four", "five"]
    return made.fit_novelty_([zoo.batch("bert", size=40)], progress=False)


def test_logged_equals_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from hydra_ensembles.integrations.mlflow_flavor import log_model, save_model

    pandas = pytest.importorskip("pandas")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    model = ensemble(tmp_path)
    expected = model.predict(TEXTS)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run():
            info = log_model(model, "films")
        loaded = mlflow.pyfunc.load_model(info.model_uri)
    finally:
        mlflow.set_tracking_uri(None)
    for inputs in (TEXTS, pandas.DataFrame({"text": TEXTS})):
        frame = loaded.predict(inputs)
        assert list(frame.columns) == list(FIELDS)
        names = expected.labels
        assert frame["label"].tolist() == names
        assert frame["uncertainty"].tolist() == pytest.approx(expected.uncertainty.tolist())
        assert frame["novelty"].tolist() == pytest.approx(expected.novelty.tolist(), abs=1e-5)
    save_model(model, tmp_path / "saved", metadata={"task": "films"})
    again = mlflow.pyfunc.load_model(str(tmp_path / "saved"))
    assert again.metadata.metadata["task"] == "films"
    assert again.predict(TEXTS)["label"].tolist() == names
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert ".safetensors" in kinds and not kinds & {".pkl", ".pickle", ".pt", ".bin", ".joblib"}


def test_the_snippet_of_the_docs_runs_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLflow's default store, a file of SQLite: the extra brings what that needs."""
    mlflow = pytest.importorskip("mlflow")
    for package in ("sqlalchemy", "alembic"):
        pytest.importorskip(package)
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "integrations.md").read_text()
    snippet = page.partition("## MLflow")[2].split("```")[1].removeprefix("python")
    model = ensemble(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    found = {"ensemble": model}
    exec(snippet, found)
    assert (tmp_path / "empty" / "mlflow.db").is_file()
    frame = mlflow.pyfunc.load_model(found["info"].model_uri).predict(TEXTS)
    names = model.predict(TEXTS).labels
    assert frame["label"].tolist() == names
    requirements = next((tmp_path / "empty").rglob("requirements.txt")).read_text()
    assert "hydra-ensembles[hosts]" in requirements  # a host of timm loads, too


def test_the_extra_brings_what_the_default_store_needs() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extra = re.search(r"^mlflow = (\[.+\])$", project, re.M)
    assert extra is not None
    names = {need.split(">=")[0] for need in json.loads(extra[1])}
    assert names >= {"mlflow-skinny", "sqlalchemy", "alembic", "pandas"}


def test_frames_of_other_inputs(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model = ensemble(tmp_path)
    batch = zoo.batch("bert", size=5)
    arrays = {name: values.numpy() for name, values in batch.items()}
    frame = predict_frame(model, arrays, batch_size=2)
    torch.testing.assert_close(
        torch.tensor(frame["confidence"].to_numpy()).float(), model.predict(batch).confidence
    )
    with pytest.raises(DataError, match="one column"):
        predict_frame(model, pandas.DataFrame({"a": ["x"], "b": ["y"]}))
    with pytest.raises(DataError, match="no inputs"):
        predict_frame(model, [])
