"""An artefact says what it is made of; `doctor` finds what was changed in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hydra_ensembles.serving.checksums import SUMS, read_sums
from hydra_ensembles.serving.checkup import check_folder
from hydra_ensembles.serving.sbom import SBOM

Copy = Callable[[], Path]


def test_an_export_is_sound_and_lists_what_it_is_made_of(copied: Copy) -> None:
    folder = copied()
    checkup = check_folder(folder)
    assert checkup.is_sound and checkup.kinds == ["an exported artefact"], str(checkup)
    files = {path.name for path in folder.iterdir()}
    assert set(read_sums(folder)) == files - {SUMS}
    assert {found.file for found in checkup.findings} == files
    (folder / "new").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "new").stat().st_mode}
    parts = {part["name"] for part in json.loads((folder / SBOM).read_text())["components"]}
    assert {"model.onnx", "model.pt2", "torch", "hydra-ensembles"} <= parts


def test_every_damage_is_found(copied: Copy) -> None:
    folder = copied()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            checkup = check_folder(folder)
            assert not checkup.is_sound, path.name
            if path.name != SUMS:  # a changed line of it speaks against another file
                assert checkup.state_of(path.name) == "damaged", path.name
        path.write_bytes(content)
    (folder / "model.pt2").unlink()
    assert check_folder(folder).state_of("model.pt2") == "missing"
    (folder / ".exporting").mkdir()
    assert check_folder(folder).state_of(".exporting") == "leftover"
