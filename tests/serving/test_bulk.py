"""Bulk prediction: every row once, whole files only, and a rerun that computes what is missing."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import ImageTransform, digits
from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.serving.bulk import predict_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 50


def png(image: torch.Tensor) -> bytes:
    content = io.BytesIO()
    pixels = ((image * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    Image.fromarray(pixels[0].numpy()).save(content, "png")
    return content.getvalue()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved ensemble with novelty and a rule, and images in two Parquet files."""
    root = tmp_path_factory.mktemp("bulk")
    data = digits(16, seed=0)
    host = TinyViT(TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24), seed=1).eval()
    masks = [hydra.HeadMask([[1] * 4, row]) for row in ([1, 1, 0, 0], [0, 0, 1, 1])]
    ensemble = hydra.fuse(host, masks)
    ensemble.id2label = list("0123456789")
    ensemble.transform = ImageTransform(
        size=16, crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    ensemble.fit_novelty_(data.validation, progress=False)
    hydra.fit_policy(ensemble, data.test, risk=0.5, alarm=0.05, progress=False)
    ensemble.save_pretrained(root / "ensemble")
    pixels = next(iter(data.test.subset(range(ROWS), batch_size=ROWS)))["pixel_values"]
    images = [{"bytes": png(image), "path": None} for image in pixels]
    images[7] = {"bytes": b"not an image", "path": None}
    (root / "rows").mkdir()
    for name, start, end in (("a", 0, 33), ("b", 33, ROWS)):
        table = pyarrow.table(
            {"id": [f"x{i}" for i in range(start, end)], "image": images[start:end]}
        )
        parquet.write_table(table, root / "rows" / f"{name}.parquet", row_group_size=8)
    return root


def read(folder: Path) -> list[dict[str, Any]]:
    rows = [
        row
        for file in sorted(folder.glob("*.parquet"))
        for row in parquet.read_table(file).to_pylist()
    ]
    return rows


def run(shelf: Path, output: Path, **options: Any) -> dict[str, int]:
    given: dict[str, Any] = {"rows_per_part": 8, "batch_size": 5, "progress": False, **options}
    return predict_files(shelf / "ensemble", [shelf / "rows"], output, **given)


@pytest.fixture(scope="module")
def answered(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    assert run(shelf, folder) == {"rows": ROWS, "parts": 8, "computed": 8}
    return folder


def test_every_row_is_answered_once_as_predict_answers_it(shelf: Path, answered: Path) -> None:
    rows = read(answered)
    assert [row["row"] for row in rows] == [*range(33), *range(ROWS - 33)]
    assert [row["id"] for row in rows] == [f"x{i}" for i in range(ROWS)]
    assert "image" not in rows[0]  # images are not copied
    ensemble = hydra.HydraEnsemble.from_pretrained(shelf / "ensemble")
    content = parquet.read_table(shelf / "rows" / "b.parquet")["image"][2].as_py()["bytes"]
    answer = ensemble.predict(Image.open(io.BytesIO(content)))
    row = rows[35]
    assert row["predicted_label"] == answer.labels[0]
    for name in ("uncertainty", "mutual_information", "novelty"):
        assert row[f"predicted_{name}"] == pytest.approx(float(getattr(answer, name)), abs=1e-5)
    assert row["predicted_error"] is None
    assert row["predicted_decision"] == answer.decision[0]
    assert row["predicted_why"] == answer.why[0]
    assert rows[7]["predicted_label"] is None and rows[7]["predicted_decision"] is None
    assert "Cannot read the image" in rows[7]["predicted_error"]
    assert len(list(answered.glob("a-*"))) == 5 and len(list(answered.glob("b-*"))) == 3


def test_a_rerun_computes_only_what_is_missing_or_damaged(shelf: Path, tmp_path: Path) -> None:
    run(shelf, tmp_path)
    before = read(tmp_path)
    files = sorted(tmp_path.glob("*.parquet"))
    kept = files[0].stat().st_mtime_ns
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-20])  # cut short
    (tmp_path / ".a-00001.parquet.77.partial").write_bytes(b"half")
    assert run(shelf, tmp_path)["computed"] == 2
    assert read(tmp_path) == before
    assert files[0].stat().st_mtime_ns == kept
    assert not list(tmp_path.glob(".*"))
    assert run(shelf, tmp_path)["computed"] == 0


def test_another_run_in_the_same_folder_is_refused(
    shelf: Path, answered: Path, tmp_path: Path
) -> None:
    before = read(answered)
    with pytest.raises(FormatError, match="rows_per_part was 8, is 9"):
        run(shelf, answered, rows_per_part=9)
    other = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"image": ["nothing.png"]}), other)
    with pytest.raises(FormatError, match="input files"):
        predict_files(
            shelf / "ensemble", [other], answered, rows_per_part=8, batch_size=5, progress=False
        )
    assert read(answered) == before
    with pytest.raises(DataError, match="one name"):
        predict_files(shelf / "ensemble", [other, shelf / "rows"], tmp_path / "out")
    with pytest.raises(DataError, match="not a saved ensemble"):
        predict_files(tmp_path, [other], tmp_path / "out", progress=False)
    other.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        predict_files(shelf / "ensemble", [other], tmp_path / "out", progress=False)


def test_the_command_line_answers_parquet_files(
    shelf: Path, answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(file) for file in sorted((shelf / "rows").iterdir())]
    common = ["predict", str(shelf / "ensemble"), *files, "--batch-size", "5"]
    assert main([*common, "-o", str(tmp_path), "--rows-per-part", "8"]) == 0
    assert "50 rows in 8 parts, 8 of them computed now" in capsys.readouterr().out
    assert read(tmp_path) == read(answered)
    assert main(common) == 2
    assert main([*common, "-o", str(tmp_path), "--risk", "0.1"]) == 2


def test_datasets_map_answers_rows(shelf: Path) -> None:
    datasets = pytest.importorskip("datasets")
    ensemble = hydra.HydraEnsemble.from_pretrained(shelf / "ensemble")
    encoded = parquet.read_table(shelf / "rows" / "a.parquet")["image"].to_pylist()[8:20]
    images = [Image.open(io.BytesIO(content["bytes"])) for content in encoded]
    table = datasets.Dataset.from_dict({"image": images, "label": list(range(12))})
    told = table.map(ensemble.as_map_function(probabilities=True), batched=True, batch_size=5)
    answer = ensemble.predict(images)
    assert told["label"] == list(range(12))  # its own columns stay
    assert told["predicted_class"] == answer.class_index.tolist()
    torch.testing.assert_close(
        torch.tensor(told["predicted_probabilities"]), answer.probabilities, atol=1e-5, rtol=0
    )
    assert told["predicted_error"] == [None] * 12
    with pytest.raises(DataError, match="No column text among label"):
        ensemble.as_map_function("text")({"label": [0]})


@pytest.mark.slow
def test_a_pool_of_ray_actors_gives_the_same(shelf: Path, answered: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [
        *(sys.executable, "-c", "from hydra_ensembles.cli.main import run; run()", "predict"),
        *(str(shelf / "ensemble"), str(shelf / "rows"), "-o", str(tmp_path), "--ray"),
        *("--batch-size", "5", "--rows-per-part", "8", "--workers", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == read(answered)
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "50 rows in 8 parts, 0 of them computed now" in again.stdout
