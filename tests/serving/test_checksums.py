"""Checksums that `sha256sum` reads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hydra_ensembles.errors import FormatError
from hydra_ensembles.serving.checksums import SUMS, check_sums, write_sums
from hydra_ensembles.serving.folder_check import check_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "artefact"
    (folder / "more").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"a program")
    (folder / "more" / "words.txt").write_text("two words")
    (folder / ".hidden").write_text("not part of it")
    return folder


def test_the_list_is_that_of_sha256sum(folder: Path) -> None:
    write_sums(folder)
    assert check_sums(folder) == {"model.onnx": None, "more/words.txt": None}
    assert check_folder(folder).is_sound
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    (folder / "model.onnx").write_bytes(b"a Program")
    (folder / "more" / "words.txt").unlink()
    assert [bool(problem) for problem in check_sums(folder).values()] == [True, True]
    checkup = check_folder(folder)
    assert checkup.state_of("model.onnx") == "damaged"
    assert checkup.state_of("more/words.txt") == "missing"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", ".hidden", ""])
def test_a_list_names_only_files_of_its_folder(folder: Path, name: str) -> None:
    (folder / SUMS).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(FormatError, match="line 1"):
        check_sums(folder)
