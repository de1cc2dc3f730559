"""Files are whole or refused: written beside, sealed, read back, on a disk that is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import _records as records
from hydra_ensembles.errors import BusyError, DiskError, FormatError, HydraError
from hydra_ensembles.evaluation import Results
from hydra_ensembles.search.search_state import SearchState, TensorStore
from hydra_ensembles.training.checkpoint import FILE_NAME, read_checkpoint, write_checkpoint
from hydra_ensembles.training.teacher_answers import _keep, read_answers


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
    with pytest.raises(FormatError, match="changed after"):
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


# --- several writers -----------------------------------------------------------------------------


@contextmanager
def held_elsewhere(target: Path, *, is_file: bool = False) -> Iterator[None]:
    """Hold a folder or a file in another thread, as another process would."""
    held, end = Event(), Event()

    def hold() -> None:
        with records.holding(target, is_file=is_file):
            held.set()
            end.wait(60)

    thread = Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        yield
    finally:
        end.set()
        thread.join()


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held_elsewhere(folder):
        with pytest.raises(BusyError, match="Another process is writing"):
            records.holding(folder).__enter__()
        with pytest.raises(BusyError), records.holding(tmp_path / "other" / ".." / "run"):
            pass
    with records.holding(folder), records.holding(folder, wait=1):  # the same thread holds it twice
        assert (folder / records.LOCK).exists()
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="is a file"), records.holding(tmp_path / "file"):
        pass


def test_who_waits_gets_it(tmp_path: Path) -> None:
    order, started = [], Event()

    def second() -> None:
        started.set()
        with records.holding(tmp_path, wait=60):
            order.append("second")

    with records.holding(tmp_path):
        thread = Thread(target=second)
        thread.start()
        started.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from hydra_ensembles._records import holding\n"
        "with holding(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(BusyError), records.holding(tmp_path):
            pass
        process.kill()
        process.wait()
    assert (tmp_path / records.LOCK).exists()
    with records.holding(tmp_path):
        pass
    assert not (tmp_path / records.LOCK).exists()


def test_threads_write_one_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda c: records.write_whole(tmp_path / "file", c), contents * 10))
    assert (tmp_path / "file").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_are_read_of_one_save(tmp_path: Path) -> None:
    """A save between two reads, and one that a reader meets half done."""

    def save(text: str, names: tuple[str, ...] = ("one", "two")) -> None:
        for name in names:
            records.write_whole(tmp_path / name, text)

    def pair(meanwhile: list[str]) -> tuple[str, str]:
        first = (tmp_path / "one").read_text()
        if meanwhile:
            save(meanwhile.pop())
        second = (tmp_path / "two").read_text()
        if first != second:
            raise FormatError("mixed")
        return first, second

    save("old")
    assert records.read_steady(tmp_path, lambda: pair(["new"])) == ("new", "new")
    assert list(tmp_path.glob("*lock*")) == []
    started = Event()

    def slow() -> None:
        with records.holding(tmp_path):
            save("newer", ("one",))
            started.set()
            Event().wait(0.2)
            save("newer", ("two",))

    thread = Thread(target=slow)
    thread.start()
    started.wait(60)
    assert records.read_steady(tmp_path, lambda: pair([])) == ("newer", "newer")
    thread.join()
    save("half", ("one",))
    with pytest.raises(FormatError, match="mixed"):  # nobody writes: it stays so
        records.read_steady(tmp_path, lambda: pair([]))


def test_long_work_refuses_a_folder_that_is_held(tmp_path: Path) -> None:
    from hydra_ensembles.research.cost_frontier import frontier
    from hydra_ensembles.research.pruning_sweep import prune_sweep
    from hydra_ensembles.serving.bulk import predict_files
    from hydra_ensembles.training import finetune_branch, make_teachers

    held = tmp_path / "held"
    data = {"id": None}
    with held_elsewhere(held):
        for work in (
            lambda: hydra.build(None, None, folder=held),
            lambda: hydra.distill(None, None, None, folder=held),
            lambda: hydra.finetune(None, None, folder=held),
            lambda: finetune_branch(None, None, folder=held),
            lambda: make_teachers(None, None, folder=held),
            lambda: hydra.find_circuit(None, **data, folder=held),
            lambda: predict_files("none", [], held),
            lambda: prune_sweep(None, None, folder=held),
            lambda: frontier(None, None, None, None, folder=held),
        ):
            with pytest.raises(BusyError, match="choose another"):
                work()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_new_files(tmp_path: Path, mask: int) -> None:
    from hydra_ensembles.hosts.tiny_vit import TinyViT

    before = os.umask(mask)
    try:
        host = TinyViT().eval()
        hydra.fuse(host, [hydra.HeadMask.full(host)]).save_pretrained(tmp_path / "ensemble")
        TensorStore(tmp_path / "store").put("one", torch.zeros(2))
        write_checkpoint(tmp_path / "run", {"model/weight": torch.zeros(2)}, {"step": 3})
        _keep(tmp_path / "answers" / "teacher-0-data-0.npy", torch.zeros(2, 1, 2).numpy())
        Results("model", {"cls/Acc": 0.75}).save(tmp_path / "results.json")
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.rglob("*") if p.is_file()}
    assert len(modes) >= 7 and set(modes.values()) == {0o666 & ~mask}, modes


def test_what_differs_between_two_runs_is_said_in_words() -> None:
    one, two = "a" * 64, "b" * 64
    saved = {
        "model": one,
        "data": {"select": one, "stop": one},
        "teachers": [one],
        "members": 3,
        "max_cost": 1.07,
        "keep": [3] * 60,
        "options": {"masks": 96, "own.key": 1},
    }
    now = {
        "model": two,
        "data": {"select": one, "stop": two},
        "teachers": [two, one],
        "members": 4,
        "max_cost": None,
        "keep": [3] * 59 + [2],
        "options": {"masks": 48, "own.key": 1},
    }
    records.check_same_run("run", saved, json.loads(json.dumps(saved)))
    with pytest.raises(FormatError, match="different settings") as found:
        records.check_same_run("run", saved, now)
    said = str(found.value)
    assert one[:12] not in said and two[:12] not in said
    assert said.startswith("run was written with different settings: ")
    for words in (
        "the data has changed",
        "keep.59 was 3, is 2",
        "max_cost was 1.07, is not set",
        "members was 3, is 4",
        "the model's weights have changed",
        "options.masks was 96, is 48",
        "and 1 more",
    ):
        assert words in said, words
