"""`try`: one command from a model and files to a page and a saved ensemble."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hydra_ensembles import HydraEnsemble
from hydra_ensembles.cli.hub_models import is_timm_name
from hydra_ensembles.cli.main import main

FEW = ("--members", 2, "--max-cost", 1.5, "--risk", 0.9, "--alarm", 0.1)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def mixed(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of digits in which two images are noise."""
    root = tmp_path_factory.mktemp("mixed") / "files"
    shutil.copytree(shelf / "digits", root)
    for number in (0, 1):
        shutil.copy(shelf / "noise" / f"00{number}.png", root / "3" / f"stranger-{number}.png")
    return root


def test_labelled_images(
    shelf: Path, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("try", shelf / "host", "--data", mixed, *FEW, "-o", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "66 images with labels" in printed and "can be fused" in printed
    assert "stranger-0.png" in printed.split("Strangest:")[1].split("Least sure")[0]
    assert "your model / your model + temperature / Hydra" in printed
    page = (tmp_path / "out" / "try.html").read_text()
    lead = page.split('class="lead">')[1].split("</p>")[0]
    assert lead.startswith("The ensemble against your model, each with a temperature: ")
    assert lead in printed and "Novelty needs no members" in page
    strangest = page.split("The strangest")[1].split("The least sure")[0]
    assert "3/stranger-0.png" in strangest and "3/stranger-1.png" in strangest
    assert ">nearest: " in strangest and "files</h2>" not in page
    for words in (
        "At a glance",
        "Your own images",
        "What an alarm level means",
        "Calibration",
        "Wrong, and surest",
    ):
        assert words in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    saved = HydraEnsemble.from_pretrained(tmp_path / "out" / "ensemble")
    assert saved.members == 2 and saved.policy is not None and saved.policy.risk == 0.9
    answer = saved.predict(mixed / "3" / "stranger-0.png")
    assert answer.decision == ["new"]


def test_files_without_labels_and_labels_that_the_model_does_not_know(
    shelf: Path, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat, renamed = tmp_path / "flat", tmp_path / "renamed"
    flat.mkdir()
    for file in mixed.rglob("*.png"):
        shutil.copy(file, flat / file.name)
    shutil.copytree(mixed, renamed)
    (renamed / "3").rename(renamed / "a fish")
    for number, data in enumerate((flat, renamed)):
        out = tmp_path / f"out{number}"
        assert run("try", shelf / "host", "--data", data, *FEW, "-o", out, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["policy"]["risk"] is None and found["held_out"] == {}
        assert len(found["novelty"]) == 66 and set(found["decisions"]) <= {"answer", "new"}
        page = (out / "try.html").read_text()
        assert "without labels" in page and "Calibration</h2>" not in page
        assert ("a fish" in page.split("</header>")[0]) == (data == renamed)


def test_what_is_wrong_is_said(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("try", shelf / "host", "--data", shelf / "noise", "-o", tmp_path) == 3
    assert "12 examples are too few" in capsys.readouterr().err
    assert run("try", shelf / "host", "--data", tmp_path / "nothing") == 3
    assert "does not exist" in capsys.readouterr().err


def test_each_model_and_data_has_a_folder_by_default(
    shelf: Path,
    mixed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("try", shelf / "host", "--data", shelf / "noise") == 3  # too few
    for data in (shelf / "digits", mixed):
        assert run("try", shelf / "host", "--data", data, *FEW) == 0
        folder = f"hydra-try-host-{data.name}"
        assert f"Writing to {folder}" in capsys.readouterr().out
        assert (tmp_path / folder / "try.html").is_file()
    assert run("try", shelf / "host", "--data", mixed, *FEW[2:]) == 5
    said = capsys.readouterr().err
    assert "members was 2, is not set" in said and "choose another folder with --output" in said
    args = ("--data", shelf / "digits", *FEW, "-o", f"hydra-try-host-{mixed.name}")
    assert run("try", shelf / "host", *args) == 5
    assert "the data has changed" in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hydra_ensembles.builder import trial as trying

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trying, "cross_fit", stop)
    assert run("try", shelf / "host", "--data", shelf / "digits", *FEW, "-o", tmp_path) == 130
    said = capsys.readouterr().err
    assert f"saved in {tmp_path}" in said and "same command" in said
    assert (tmp_path / "state" / "build.json").is_file()
    monkeypatch.undo()
    assert run("try", shelf / "host", "--data", shelf / "digits", *FEW, "-o", tmp_path) == 0


def test_bare_names_of_timm() -> None:
    assert is_timm_name("deit_tiny_patch16_224") and is_timm_name("vit_tiny_patch16_224@w.safe")
    for other in ("bert-base-uncased", "google/vit_base", "timm:deit_tiny_patch16_224", "no_model"):
        assert not is_timm_name(other)
