"""`doctor`: sound folders are sound, every damage is found, and what can be saved is saved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.errors import FormatError
from hydra_ensembles.evaluation import Results
from hydra_ensembles.fusion import HydraEnsemble
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.search.search_state import SearchState, TensorStore
from hydra_ensembles.serving.folder_check import check_folder, repair
from hydra_ensembles.training.checkpoint import write_checkpoint
from hydra_ensembles.training.teacher_answers import _keep

SHAPE = TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `build`, `distill` and `eval` leave, in one folder."""
    folder = tmp_path_factory.mktemp("made") / "run"
    model = TinyViT(SHAPE, seed=0).eval()
    masks = [hydra.HeadMask([[1] * 4, row]) for row in ([1, 1, 0, 0], [0, 0, 1, 1])]
    ensemble = hydra.fuse(model, masks)
    images, labels = torch.rand(12, 1, 16, 16), torch.arange(12) % 10
    ensemble.fit_novelty_([(images, labels)], progress=False)
    ensemble.save_pretrained(folder)
    (folder / "config.yaml").write_text("command: build\nmembers: 2\n")
    state = SearchState(folder / "state", {"seed": 0}, name="build.json")
    state.add({"round": 1})
    TensorStore(folder / "state" / "candidates").put("one", torch.randn(3, 2))
    (folder / "state" / "answers").mkdir()
    _keep(folder / "state" / "answers" / "teacher-0-data-0.npy", torch.randn(3, 1, 2).numpy())
    record = {"step": 3, "settings": {"epochs": 2, "steps_per_epoch": 4}}
    write_checkpoint(folder / "state", {"model/weight": torch.randn(3)}, record)
    examples = {"id": {"score": torch.rand(4)}}
    Results("model", {"cls/Acc": 0.5}, examples=examples).save(folder / "results-model.json")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def ours(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "README.md")


def test_a_sound_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("Sound.\n")
    for words in ("a saved ensemble", "steps of build", "training;", "the ensemble loads"):
        assert words in said
    assert main(["doctor", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sound"]
    files = {finding["file"] for finding in found["findings"]}
    missed = {p.relative_to(folder).as_posix() for p in ours(folder)} - files
    assert missed == {"state/answers/teacher-0-data-0.sha256"}


@pytest.mark.parametrize("way", ["flip", "cut", "empty", "remove"])
def test_damage_is_found_where_it_is(folder: Path, way: str) -> None:
    for path in ours(folder):
        name = path.relative_to(folder).as_posix()
        if name.endswith(".sha256") or (way == "remove" and "state" in name):
            continue  # without it, or without a step, a rerun makes it again
        content = bytearray(path.read_bytes())
        if way == "flip":
            if path.suffix == ".yaml":
                continue  # nothing tells a flipped letter from another option
            content[len(content) // 2] ^= 4
        path.write_bytes(content[: len(content) // 2] if way == "cut" else content)
        if way == "empty":
            path.write_bytes(b"")
        if way == "remove":
            path.unlink()
        checkup = check_folder(folder)
        bad = [f.file for f in checkup.findings if f.state in ("damaged", "missing")]
        alone = (way == "remove" and path.suffix == ".yaml") or name == "results-model.json"
        if path.suffix == ".yaml":
            assert not bad or bad == [name]
        elif not (alone and way == "remove"):
            beside = {name.replace("safetensors", "json")} if "results" in name else set()
            assert set(bad) & ({name} | beside), (name, way, str(checkup))
        shutil.copy(made_of(folder) / name, path)
    assert check_folder(folder).is_sound


def made_of(folder: Path) -> Path:
    return folder.with_name("whole")


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> Any:
    if "folder" in request.fixturenames:
        folder = request.getfixturevalue("folder")
        shutil.copytree(folder, made_of(folder))


def test_exit_codes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    assert main(["doctor", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "1 damaged or missing files." in said and "fuse(host, masks)" in said
    (tmp_path / "none").mkdir()
    assert main(["doctor", str(tmp_path / "none")]) == 3
    assert main(["doctor", str(tmp_path / "nowhere")]) == 5


def test_repair_finishes_a_save_and_removes_leftovers(folder: Path) -> None:
    other = HydraEnsemble.from_pretrained(folder)
    other.temperature = 2.5
    other.save_pretrained(folder.with_name("other"))
    (folder / ".saving").mkdir()
    for name in ("config.json", "novelty.safetensors"):
        shutil.copy(folder.with_name("other") / name, folder / ".saving" / name)
    (folder / "state" / f".build.json.{2**22 + 1}.partial").write_text("{")
    alive = folder / "state" / f".build.json.{os.getpid()}.partial"
    alive.write_text("{")
    checkup = check_folder(folder)
    assert len(repair(checkup)) == 2
    again = check_folder(folder)
    assert again.is_sound and alive.exists() and not (folder / ".saving").exists()
    assert [found.file for found in again.findings if found.state == "leftover"] == [
        alive.relative_to(folder).as_posix()
    ]
    assert HydraEnsemble.from_pretrained(folder).temperature == 2.5


def test_links_that_lead_out_are_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (folder / "notes.json").symlink_to(tmp_path / "secret.json")
    assert check_folder(folder).state_of("notes.json") == "damaged"


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="not a folder"):
        check_folder(tmp_path / "file")
