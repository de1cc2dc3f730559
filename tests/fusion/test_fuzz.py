"""A sample of `benchmarks/fuzz.py`: no folder and no record ends in an error that is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loose_files import ROOT, load

pytestmark = pytest.mark.filterwarnings("ignore")  # unknown keys warn, odd configs too


def test_damaged_folders_are_refused_or_load_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = load("benchmarks/fuzz.py").fuzz_folders(54, seed=1)
    assert found["failures"] == []
    assert found["total"]["refused with our error"] > 30
    assert sum(found["total"].values()) == 54


@pytest.mark.slow
def test_odd_records_get_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fuzz = load("benchmarks/fuzz.py")
    made = {name: folder for name, (folder, _) in fuzz.make_ensembles(tmp_path).items()}
    found = fuzz.fuzz_records(made, 80, seed=1)
    assert found["failures"] == []
    assert found["total"]["answered, as alone"] > 10
    assert found["total"]["its error line"] > 10


@pytest.mark.slow
def test_damaged_artefacts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fuzz = load("benchmarks/fuzz.py")
    done, source = fuzz.empty(), fuzz.Artefacts(tmp_path, 1)
    for found in fuzz.in_forks(source.one, list(range(39))):
        fuzz.add_up(done, found)
    assert done["failures"] == []
    assert done["total"]["refused with our error"] > 20
