"""Files are whole or refused: written beside, sealed, read back, on a disk that is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hydra_ensembles import _records as records
from hydra_ensembles.errors import DiskError, FormatError, HydraError
from hydra_ensembles.evaluation import Results
from hydra_ensembles.search.state import SearchState, TensorStore
from hydra_ensembles.training.answers import _keep, read_answers
from hydra_ensembles.training.checkpoint import FILE_NAME, read_checkpoint, write_checkpoint


def flips(content: bytes, count: int = 40) -> list[bytes]:
    """Return copies with one bit flipped, at places all over the content."""
    found = []
    for number in range(count):
        place = number * (len(content) - 1) // (count - 1)
        changed = bytearray(content)
        changed[place] ^= 1 << (number % 8)
        found.append(bytes(changed))
    return found


def damages(content: bytes) -> list[bytes]:
    return [*flips(content), content[: len(content) // 2], b"", content[:-1]]


def test_a_state_is_sound_or_refused(tmp_path: Path) -> None:
    state = SearchState(tmp_path, {"seed": 1})
    state.add({"effect": [0.125, 0.25], "selected": [1, 0]})
    path = tmp_path / "search.json"
    for content in damages(path.read_bytes()):
        path.write_bytes(content)
        with suppress(HydraError):
            assert SearchState(tmp_path, {"seed": 1}).steps == state.steps
    path.write_bytes(b"[]")
    with pytest.raises(FormatError, match="not the state of a search"):
        SearchState(tmp_path, {"seed": 1})


def test_tensors_are_sound_or_refused(tmp_path: Path) -> None:
    logits = torch.randn(7, 5)
    store = TensorStore(tmp_path)
    store.put("one", logits)
    write_checkpoint(tmp_path, {"model/weight": logits}, {"step": 3})
    for path, read in (
        (tmp_path / "one.safetensors", lambda: (store.get("one"), 3)),
        (
            tmp_path / FILE_NAME,
            lambda: (lambda t, r: (t["model/weight"], r["step"]))(*read_checkpoint(tmp_path)),
        ),
    ):
        refused = 0
        for content in damages(path.read_bytes()):
            path.write_bytes(content)
            try:
                tensor, step = read()
                assert torch.equal(tensor, logits) and step == 3
            except FormatError:
                refused += 1
        assert refused > 30


def test_answers_of_teachers_are_sound_or_refused(tmp_path: Path) -> None:
    table = torch.randn(6, 1, 4).numpy()
    path = tmp_path / "teacher-0-data-0.npy"
    _keep(path, table)
    assert (read_answers(path) == table).all()
    for content in damages(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="asked again"):
            read_answers(path)


def test_results_are_sound_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    figures = {"cls/Acc": 0.75, "cls/NLL": 0.5}
    Results("model", figures).save(path)
    assert Results.load(path).figures == figures
    for content in damages(path.read_bytes()):
        path.write_bytes(content)
        with suppress(FormatError):
            assert Results.load(path).figures == figures


def test_records_without_a_seal_may_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    records.to_record("Thing", {"value": 1}, path)
    path.write_text(path.read_text().replace("1}", "2}"))
    assert records.read_record("Thing", path)["value"] == 2
    records.to_record("Thing", {"value": 1}, path, seal=True)
    path.write_text(path.read_text().replace('"value": 1', '"value": 2'))
    with pytest.raises(FormatError, match="changed after it was written"):
        records.read_record("Thing", path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(FormatError, match="not the JSON"):
        records.read_record("Thing", path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The kernel refuses a file of more than 64 kB: a real full disk, but for its errno."""
    path = tmp_path / "file"
    path.write_text("old")
    code = (
        "import resource, signal, sys\n"
        "from hydra_ensembles._records import write_whole\n"
        "from hydra_ensembles.errors import DiskError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "try:\n"
        "    write_whole(sys.argv[1], bytes(2**20))\n"
        "except DiskError as error:\n"
        "    print(error)\n"
    )
    run = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert f"Cannot write {path}" in said and "make room" in said
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        records.write_whole(tmp_path, b"")
    with pytest.raises(ValueError, match="mine"), records.writing(tmp_path):
        raise ValueError("mine")
    with pytest.raises(DiskError, match="Cannot write") as found, records.writing("there"):
        raise OSError(28, os.strerror(28))
    assert found.value.errno == 28 and "No space left" in str(found.value)


def test_devices_pipes_and_links_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    records.write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    records.write_whole(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_links_and_names_do_not_lead_out(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text(json.dumps({}))
    (folder / "link").symlink_to(tmp_path / "secret")
    for name in ("link", "../secret", str(tmp_path / "secret")):
        with pytest.raises(FormatError, match="leads out"):
            records.inside(folder, name)
    assert records.inside(folder, "file") == folder / "file"
