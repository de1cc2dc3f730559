"""An export lists its files; `doctor` finds what was changed in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hydra_ensembles.serving.checksums import SUMS, check_sums
from hydra_ensembles.serving.folder_check import check_folder

Copy = Callable[[], Path]


def test_an_export_is_sound_and_lists_its_files(copied: Copy) -> None:
    folder = copied()
    checkup = check_folder(folder)
    assert checkup.is_sound, str(checkup)
    files = {path.name for path in folder.iterdir()}
    assert set(check_sums(folder)) == files - {SUMS}
    assert {found.file for found in checkup.findings} == files
    (folder / "new").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "new").stat().st_mode}


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
    (folder / "model.onnx").unlink()
    assert check_folder(folder).state_of("model.onnx") == "missing"
    (folder / ".exporting").mkdir()
    assert check_folder(folder).state_of(".exporting") == "leftover"
