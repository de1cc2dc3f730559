"""`predict --why`: what made an input new, for images and texts; names can be left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hydra_ensembles import HydraEnsemble
from hydra_ensembles.cli.main import main
from hydra_ensembles.uncertainty.evidence import KNOWN
from tests.fusion.test_why_novel import FEW, SHORT, TEXTS, fitted

BUILD = ("--method", "taylor", "--members", 2, "--max-cost", 1.5)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def answers(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_images(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = tmp_path / "built"
    assert run("build", shelf / "host", "--data", shelf / "digits", *BUILD, "-o", built) == 0
    files = tmp_path / "files"
    shutil.copytree(shelf / "digits" / "3", files)
    known = sorted(files.glob("*.png"))[0]
    with Image.open(known) as image:
        image.resize((64, 48)).point(lambda value: 255).save(files / "zz.png")
    (files / "broken.png").write_bytes(b"no image")
    capsys.readouterr()
    assert run("predict", built, files, "--why") == 3  # one is broken
    rows = {Path(row["file"]).name: row for row in answers(capsys)}
    evidence = rows[known.name]["evidence"]
    assert evidence["note"] == KNOWN and f"3/{known.name}" in evidence["nearest"][0]["name"]
    facts = " and ".join(rows["zz.png"]["evidence"]["facts"])
    assert "width 64 pixels; known images have 16" in facts
    assert "brightness 1.00; known images have 0." in facts and "contrast 0.00" in facts
    assert rows["zz.png"]["evidence"]["note"] is None
    assert rows["broken.png"]["error"] and rows["broken.png"]["evidence"] is None
    assert run("predict", built, known) == 0
    assert "evidence" not in answers(capsys)[0]


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted().save_pretrained(tmp_path / "saved")
    (tmp_path / "ask.txt").write_text(f"film\n{TEXTS[3]}\n", encoding="utf-8")
    assert run("predict", tmp_path / "saved", tmp_path / "ask.txt", "--why") == 0
    short, known = (row["evidence"] for row in answers(capsys))
    assert short["facts"] == [SHORT, FEW] and short["nearest"][0]["name"] in TEXTS
    assert known["note"] == KNOWN and known["facts"] == []


def test_no_names_and_no_novelty(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*BUILD, "--no-names", "-o", tmp_path)
    assert run("build", shelf / "host", "--data", shelf / "digits", *options) == 0
    assert ".png" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    novelty = HydraEnsemble.from_pretrained(tmp_path).novelty
    assert (
        novelty is not None and novelty.names == () and novelty.ranges.ranges["width"] == (16, 16)
    )
    assert run("predict", shelf / "host", shelf / "noise", "--why") == 2
    assert "--why needs a model that knows its data" in capsys.readouterr().err
