"""The last mile, in processes of their own: file modes, other users, commands, MLflow."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_ensembles.fusion.folder_reader import find_folder
from tests.first_hour.small import texts, timm_images

SAVE = """
import os, sys
import torch, transformers
import hydra_ensembles as hydra
os.umask(int(sys.argv[3], 8))
model = transformers.BertForSequenceClassification.from_pretrained(sys.argv[1]).eval()
ensemble = hydra.build(
    model, (["a good film", "a dull plot"] * 24, ["pos", "neg"] * 24), method="random", members=2,
    max_cost=None, progress=False,
)
ensemble.save_pretrained(sys.argv[2])
"""
PREDICT = """
import os, sys
if len(sys.argv) > 2:
    os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
    os.environ["HOME"] = "/nonexistent"
import hydra_ensembles as hydra
ensemble = hydra.load(sys.argv[1])
answer = ensemble.predict(["a good film"])
assert answer.novelty is not None
print(answer.labels[0], os.access(sys.argv[1], os.W_OK))
"""
LOG = """
import sys
import mlflow
import hydra_ensembles as hydra
from hydra_ensembles.integrations.mlflow_flavor import log_model
mlflow.set_tracking_uri(sys.argv[2])
ensemble = hydra.load(sys.argv[1])
with mlflow.start_run():
    info = log_model(ensemble, "films")
loaded = mlflow.pyfunc.load_model(info.model_uri)
frame = loaded.predict(["a good film", "a dull plot"])
assert frame["label"].tolist() == ensemble.predict(["a good film", "a dull plot"]).labels
"""


def python(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip


def hydra_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from hydra_ensembles.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return python(code, *arguments)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("host")).folder


@pytest.fixture(scope="module")
def saved(host: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployed") / "films"
    ended = python(SAVE, host, folder, "022")
    assert ended.returncode == 0, ended.stderr
    return folder


def test_a_saved_folder_follows_the_umask(saved: Path) -> None:
    assert find_folder(saved, None) == saved
    for path in (saved, *saved.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} <= {
        ".json", ".safetensors", ".md", ".txt", ".jinja",
    }  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users as Unix has them")
def test_another_user_reads_a_folder_that_it_cannot_write(saved: Path) -> None:
    if os.getuid():  # only root can become another user: take the right to write instead
        modes = {path: path.stat().st_mode for path in (saved, *saved.rglob("*"))}
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        ended = python(PREDICT, saved)
        for path, mode in modes.items():
            path.chmod(mode)
    elif not all(parent.stat().st_mode & 0o001 for parent in Path(sys.base_prefix).parents):
        pytest.skip("Python itself lies in a folder that other users cannot read")
    else:
        for parent in saved.parents:
            if parent.stat().st_uid == 0 and str(parent) != "/" and "pytest" in str(parent):
                parent.chmod(parent.stat().st_mode | 0o055)
        ended = python(PREDICT, saved, 65534)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() in (["pos", "False"], ["neg", "False"])


def test_mlflow_logs_and_loads_it(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    ended = python(LOG, saved, (tmp_path / "runs").as_uri())
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_texts_by_csv_on_the_command_line(host: Path, saved: Path, tmp_path: Path) -> None:
    table = tmp_path / "films.csv"
    lines = ["a good film,pos", "a dull plot,neg"] * 12
    table.write_text("\n".join(["text,label", *lines]) + "\n")
    ended = hydra_command("eval", saved, "--data", table, "--quiet")
    assert ended.returncode == 0, ended.stderr
    table.write_text("\n".join(["tweet,mood", *lines]) + "\n")
    ended = hydra_command("eval", saved, "--data", table)
    assert ended.returncode and "Traceback" not in ended.stderr
    assert "tweet, mood" in " ".join(ended.stderr.split())


def test_images_by_folder_and_timm_checkpoint(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    import torch

    photos = timm_images(tmp_path)
    model = timm.create_model("test_vit", pretrained=False, num_classes=3)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.pth.tar")
    ended = hydra_command(
        "eval", f"timm:test_vit@{tmp_path / 'best.pth.tar'}", "--data", photos.folder, "--quiet",
        "--class-names", "cat,dog,owl",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
