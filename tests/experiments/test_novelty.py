"""The novelty tables: records of one run, rows that are told apart, missing figures, the driver."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from lab import known, known_page, known_table
from lab.detectors import gaussian, single_taps
from lab.differences import Resamples, resampled_figures, told_above
from lab.known_table import FAMILIES, ROWS, write_table
from safetensors.torch import load_file, save_file

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles.evaluation.metrics import ood_figures
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

pytest.importorskip("pytorch_ood")
ROOT = Path(__file__).parents[2]
WIDTH, CLASSES, BLOCKS = 8, 3, 4


def stored(count: int, *, shift: float, seed: int) -> dict[str, torch.Tensor]:
    """Draw what `known.extract` stores of a small model: classes about centres, moved aside."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    centres = 2 * torch.eye(CLASSES, WIDTH)
    features = centres[labels] + 0.5 * torch.randn(count, WIDTH, generator=draw)
    features[:, -1] += shift
    logits = features @ centres.T
    return {
        "readout": features[:, None].repeat(1, BLOCKS, 1),
        "mean": features[:, None].repeat(1, BLOCKS, 1) + 0.1,
        "end": features.clone(),
        "logits": logits,
        "features": features,
        "members": logits[:, None].repeat(1, 3, 1),
        "labels": labels,
        "weight": centres,
        "bias": torch.zeros(CLASSES),
    }


def store_task(cache: Path, seeds: tuple[int, ...] = (0,)) -> None:
    """Store the sets of `digits` as if its hosts had run."""
    outliers = [name for family in FAMILIES["digits"].values() for name in family]
    for host in seeds:
        folder = cache / "novelty" / ("digits" if host == 0 else f"digits-seed{host}")
        folder.mkdir(parents=True)
        for place, name in enumerate(("known-0", "test", "train", *outliers)):
            shift = 0.0 if place < 3 else 3.0
            data = stored(60 if place else 90, shift=shift, seed=100 * host + place)
            save_file(data, folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A record of a run without other hosts, written over one that had a Deep Ensemble."""
    place = tmp_path_factory.mktemp("novelty")
    store_task(place)
    old = {"deep ensemble": {"members": 3}, "contaminated": [], "detectors": {}, "stale": 1}
    (place / "novelty-digits.json").write_text(json.dumps(old))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_table, "RESULTS", place)
        patch.setattr(known_table, "DRAWS", 2)
        write_table(place, "digits")
    return json.loads((place / "novelty-digits.json").read_text())


def test_a_record_holds_only_what_its_run_computed(record: dict) -> None:
    assert "stale" not in record
    assert not record.get("deep ensemble")
    assert not any(row.startswith("Deep Ensemble") for row in record["detectors"]["90"][0])


def test_a_record_has_the_rows_that_it_should(record: dict) -> None:
    draws = record["detectors"]["90"]
    rows = set(draws[0])
    missing = {row for row in ROWS if row not in rows}
    assert missing == {row for row in ROWS if row.startswith(("Deep Ensemble", "single student"))}
    assert rows <= set(ROWS)
    assert all(k in (1, 2, 5, 10, 20, 50) for k in record["neighbours"])
    for row in ("novelty", "single + novelty", "multi-layer knn", "knn, trained statistics"):
        assert draws[0][row]["noise"]["AUROC"] > 70, row
    # three equal members and their single model differ by the blocks of the trunk only
    assert abs(record["single less Hydra"]["far"][0]) < 10


def test_missing_figures_are_shown_as_missing(record: dict) -> None:
    table = known_page.detector_table(record)
    lines = {line.split("|")[1].strip(): line for line in table.splitlines()}
    for row in ("Deep Ensemble, energy", "single student + novelty"):
        assert lines[row].count("| – ") == 9
    assert "–" not in lines["Hydra + novelty"]
    assert "[scribbles]" in table and "**near**" in table


def test_bold_is_the_best_and_what_is_not_told_from_it(record: dict) -> None:
    rows, figures = record["rows"], known_page.detector_rows(record)
    bold = known_page.best_rows(record, "far")
    best = max(rows, key=lambda row: figures[row]["far"])
    told = {rows[place] for place in record["above"]["far"][rows.index(best)]}
    assert best in bold and set(bold) == set(rows) - told
    assert "msp" in told  # it is far behind here
    assert known_page.best_rows(record, "far", ["msp"]) == ["msp"]


def test_the_page_is_what_its_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in known_page.RESULTS.glob("novelty-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
        assert json.loads(file.read_text(encoding="utf-8"))["commit"].isalnum()  # no changes
    page = (known_page.RESULTS / "novelty.md").read_text(encoding="utf-8")
    monkeypatch.setattr(known_page, "RESULTS", tmp_path)
    known_page.write_page()
    assert (tmp_path / "novelty.md").read_text(encoding="utf-8") == page, "run novelty.py page"


def test_three_hosts_are_a_deep_ensemble(tmp_path: Path) -> None:
    store_task(tmp_path, seeds=(0, 1, 2))
    figures = known_table.Figures(tmp_path, "digits")
    assert figures.test["ensemble logits"].shape == (60, 3, CLASSES)
    assert {row for row in ROWS if row.startswith("Deep")} <= set(figures.rows(60, 0))


def test_a_student_has_a_row_of_its_own(tmp_path: Path) -> None:
    store_task(tmp_path)
    folder = known.folder_of(tmp_path, "digits", None)
    folder.mkdir()
    for file in (tmp_path / "novelty" / "digits").glob("*.safetensors"):
        data = load_file(file)  # a student that equals its host
        kept = {"taps": single_taps(data), "logits": data["logits"][:, None].contiguous()}
        save_file(kept, folder / file.name)
    figures = known_table.Figures(tmp_path, "digits")
    scored = figures.scored(figures.rows(60, 0), figures.test)
    alone, student = (scored[f"single{who} + novelty"] for who in ("", " student"))
    assert all(torch.equal(alone[name], student[name]) for name in alone)
    compared = figures.compared([scored], 60)
    assert compared["student less Hydra"] == compared["single less Hydra"]


def test_a_student_is_extracted_as_its_novelty_hears_it() -> None:
    model = TinyViT(TinyViTConfig(image_size=8, patch_size=4, width=16, layers=3, heads=2), seed=0)
    student = fuse(model, [HeadMask.full(model)], branch_layer=2).eval()
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(40, 1, 8, 8, generator=draw)
    labels = torch.arange(40) % 10
    found = known.extract_student(student, [(pixels[:20], labels[:20]), (pixels[20:], labels[20:])])
    student.fit_novelty_([(pixels, labels)], progress=False)
    fitted = known_table.fit_statistics(found["taps"], found["logits"], labels)
    said = student.predict(pixels)
    expected = fitted(found["taps"], found["logits"])[1]
    torch.testing.assert_close(said.novelty_score.double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_resampled_figures_are_those_of_the_resampled_examples() -> None:
    draw = torch.Generator().manual_seed(0)
    inside = torch.randint(9, (40,), generator=draw).double().sort().values  # with ties
    outside = torch.randint(4, 14, (30,), generator=draw).double()
    weights = [torch.randint(3, (2, size), generator=draw).double() for size in (40, 30)]
    found = resampled_figures(inside, outside, *weights)
    for place in range(2):
        pair = [
            some.repeat_interleave(weight[place].long())
            for some, weight in zip((inside, outside), weights, strict=True)
        ]
        expected = ood_figures(*pair)
        assert float(found[0][place]) == pytest.approx(expected["AUROC"])
        assert float(found[1][place]) == pytest.approx(expected["FPR95"])


def test_rows_are_told_apart_only_when_pairs_say_so() -> None:
    draw = torch.Generator().manual_seed(0)
    inside, outside = (torch.randn(200, generator=draw).double() for _ in range(2))
    rows = [outside + 1, outside + 1.3, outside + 1]
    rows[2] = rows[2] + 0.5 * torch.randn(200, generator=draw).double()  # noise, no worse by much
    resamples = Resamples({"test": 200, "new": 200}, [torch.arange(200)] * 2)
    pairs = [resamples.figures([{"test": inside, "new": row}] * 2)["new"] for row in rows]
    above = told_above(torch.stack([auroc for auroc, _ in pairs]))
    assert 0 in above[1] and above[0] != [1]
    assert 0 not in above[0] and 0 not in above[2]


def run_driver(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the driver with `echo` for Python: commands are said, not run."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("HYDRA_")}
    return subprocess.run(
        ("bash", str(ROOT / "experiments" / "reproduce.sh"), *arguments),
        env={**settings, "PYTHON": "echo", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_driver_runs_parts_once_and_says_what_they_took(tmp_path: Path) -> None:
    kept = tmp_path / "work" / "answers" / "novelty" / "digits"
    kept.mkdir(parents=True)
    (kept / "test.safetensors").write_bytes(b"features")
    place = {"HYDRA_WORK": str(tmp_path / "work"), "HYDRA_PARTS": str(tmp_path / "parts.csv")}
    first = run_driver("features-digits-0", **place)
    assert first.returncode == 0, first.stderr
    assert "novelty.py features digits --seeds 0" in first.stdout
    assert (tmp_path / "work" / "kept" / "features-digits-0.tar.gz").exists()
    head, line = (tmp_path / "parts.csv").read_text().splitlines()
    fields = dict(zip(head.split(","), line.split(","), strict=True))
    assert fields["part"] == "features-digits-0" and len(fields["sha256"]) == 64
    assert run_driver("features-digits-0", **place).stdout == ""
    again = run_driver("--again", "features-digits-0", **place)
    assert "features digits" in again.stdout
    repeated = (tmp_path / "parts.csv").read_text().splitlines()
    assert len(repeated) == 2 and repeated[1].endswith(fields["sha256"])


def test_the_driver_says_what_is_missing(tmp_path: Path) -> None:
    place = {"HYDRA_WORK": str(tmp_path / "work"), "HYDRA_PARTS": str(tmp_path / "parts.csv")}
    found = run_driver("host-sst2-0", **place)
    assert found.returncode == 1 and "set HYDRA_DATA" in found.stderr
    assert run_driver("nothing", **place).returncode == 2
    listed = run_driver("--list").stdout.split()
    assert {"host-cola-2", "features-sst2-student", "novelty-page", "table-digits", "llama"} <= set(
        listed
    )


def test_gaussian_rivals_survive_a_direction_without_variance() -> None:
    data = stored(240, shift=0.0, seed=1)
    rows = data["features"].double()
    rows = 30 * (rows - rows.mean(1, keepdim=True))  # as after a LayerNorm
    data["features"], labels = rows.float(), data["labels"]
    means = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    apart, all_apart = rows - means[labels], rows - rows.mean(0)
    within, overall = (torch.linalg.pinv(x.T @ x, rtol=1e-9) for x in (apart, all_apart))
    gaps = rows[:, None] - means
    expected = torch.einsum("ncd,de,nce->nc", gaps, within, gaps).amin(1)
    expected -= torch.einsum("nd,de,ne->n", all_apart, overall, all_apart)
    found = gaussian(data)["rmds"](data)
    assert torch.corrcoef(torch.stack([found.double(), expected]))[0, 1] > 0.999
