"""Checksums that `sha256sum` reads, signatures by a key, and the bill of materials."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from hydra_ensembles.errors import FormatError, HydraError
from hydra_ensembles.serving.checksums import (
    SIGNATURE,
    SUMS,
    check_signature,
    check_sums,
    write_sums,
)
from hydra_ensembles.serving.checkup import check_folder
from hydra_ensembles.serving.sbom import SBOM, write_sbom

needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "artefact"
    (folder / "more").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"a program")
    (folder / "more" / "words.txt").write_text("two words")
    (folder / ".hidden").write_text("not part of it")
    return folder


def key(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(make, check=True)
    return path


def test_the_list_is_that_of_sha256sum(folder: Path) -> None:
    write_sums(folder)
    assert check_sums(folder) == {"model.onnx": None, "more/words.txt": None}
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    (folder / "model.onnx").write_bytes(b"a Program")
    (folder / "more" / "words.txt").unlink()
    assert [bool(problem) for problem in check_sums(folder).values()] == [True, True]
    assert not check_folder(folder).is_sound


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", ".hidden", ""])
def test_a_list_names_only_files_of_its_folder(folder: Path, name: str) -> None:
    (folder / SUMS).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(FormatError, match="line 1"):
        check_sums(folder)


@needs_ssh
def test_signatures(folder: Path, tmp_path: Path) -> None:
    mine, other = key(tmp_path, "mine"), key(tmp_path, "other")
    write_sums(folder, key=mine)
    assert "Good" in check_signature(folder, mine.with_suffix(".pub"))
    assert check_folder(folder, public_key=mine.with_suffix(".pub")).is_sound
    with pytest.raises(FormatError, match="another key"):
        check_signature(folder, other.with_suffix(".pub"))
    (folder / SUMS).write_text((folder / SUMS).read_text() + f"{'0' * 64}  new\n")
    with pytest.raises(FormatError, match="was changed"):
        check_signature(folder)
    write_sums(folder)  # a new list has no old signature
    with pytest.raises(FormatError, match="nobody signed"):
        check_signature(folder)
    assert not (folder / SIGNATURE).exists()
    with pytest.raises(HydraError, match="no key"):
        write_sums(folder, key=tmp_path / "none")


def test_the_bill_of_materials(folder: Path) -> None:
    write_sbom(folder, ["model.onnx"])
    first = (folder / SBOM).read_bytes()
    content = json.loads(first)
    assert content["bomFormat"] == "CycloneDX"
    parts = {part["name"]: part for part in content["components"]}
    assert parts["torch"]["purl"] == f"pkg:pypi/torch@{version('torch')}"
    assert parts["model.onnx"]["hashes"][0]["alg"] == "SHA-256"
    assert "sympy" in parts  # what torch needs
    write_sbom(folder, ["model.onnx"])
    assert (folder / SBOM).read_bytes() == first
