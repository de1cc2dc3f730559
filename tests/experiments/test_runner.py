"""The runner on a task that trains in a second: answers kept, figures of them, rows in parts."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
from lab import methods, tasks
from lab.answers import Store, evaluate_answers
from lab.records import Records
from run import run

from hydra_ensembles import compare, evaluate
from hydra_ensembles.data.splits import sample
from hydra_ensembles.hosts.tiny_vit import TinyViTConfig


class Tiny(tasks.Digits):
    """The digits with few examples, a smaller host and one epoch."""

    name = "tiny"
    shape = TinyViTConfig(image_size=8, patch_size=4, width=16, layers=4, heads=4, mlp_width=16)
    epochs = 1
    shifts = {}  # noqa: RUF012

    @property
    def test(self):
        return sample(self._demo.test, 60)

    @property
    def held_out(self):
        return sample(self._demo.validation, 40)

    @property
    def calibration(self):
        return sample(self._demo.validation, 60, seed=1)

    @property
    def ood(self):
        some = {name: sample(self._demo.ood[name], 30) for name in ("letters", "noise", "textures")}
        return {"near": {"letters": some.pop("letters")}, "far": some}


TABLE = {
    "name": "tiny",
    "task": "tiny",
    "scores": ["msp", "energy"],
    "against": ["single", "Deep Ensembles"],
    "rows": [
        {"name": "single", "method": "single", "draws": 2},
        {"name": "Deep Ensembles", "method": "deep-ensemble", "seeds": [0, 1]},
        {"name": "Hydra random", "method": "build", "options": {"method": "random"}, "draws": 2},
        {"name": "MC dropout", "method": "baseline", "baseline": "mc-dropout"},
        {
            "name": "trained",
            "method": "branch",
            "source": "host",
            "options": {"epochs": 1, "distill": 0.5, "outlier_weight": 0.1},
            "proxies": ["blur"],
            "by_name": True,
        },
        {
            "name": "distilled",
            "method": "distill",
            "seeds": [0, 1],
            "options": {"members": 2, "epochs": 1},
            "novelty": True,
            "by_name": True,
        },
    ],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)


def arguments(place: Path, **changes: object) -> argparse.Namespace:
    settings = {"rows": None, "draws": None, "resamples": 20, "data": None}
    folders = {"hosts": place / "hosts", "cache": place / "cache", "out": place / "out"}
    return argparse.Namespace(**{**settings, **folders, **changes})


def test_rows_run_and_are_kept(place: Path) -> None:
    run(TABLE, arguments(place))
    records = Records.read("tiny", place / "out")
    assert set(records.rows) == {
        *(("single", 0), ("single", 1), ("Deep Ensembles", 0)),
        *(("Hydra random", 0), ("Hydra random", 1), ("MC dropout", 0)),
    }  # a row marked by_name waits to be named
    assert records.mean("Deep Ensembles", "cost") == 2
    assert records.mean("Hydra random", "cost") <= 1.07
    assert ("Hydra random", "single", "ood/far/mean/energy/AUROC") in records.differences
    assert "ood/near/letters/AUROC" in records.rows["single", 0]


def test_figures_are_those_of_evaluate_and_compare(place: Path) -> None:
    task = tasks.open_task("tiny", None, place / "hosts")
    store = Store(place / "cache", task)
    direct = evaluate(
        task.host(1),
        task.test,
        ood=task.ood,
        score=["msp", "energy"],
        temperature=task.held_out,
        progress=False,
    )
    rows = {row["name"]: row for row in TABLE["rows"]}
    results = {
        name: [
            evaluate_answers(
                methods.answer(store, rows[name], d), scores=["msp", "energy"], name=""
            )
            for d in (0, 1)
        ]
        for name in ("single", "Hydra random")
    }
    assert results["single"][1].figures == pytest.approx(direct.figures, abs=1e-9)
    records = Records.read("tiny", place / "out")
    assert records.rows["single", 1]["cls/NLL"] == pytest.approx(direct["cls/NLL"], abs=5e-5)
    found = compare(results["Hydra random"], results["single"], count=20)["post/cls/NLL"]
    kept = records.differences["Hydra random", "single", "post/cls/NLL"]
    assert kept[:3] == pytest.approx((found.difference, found.low, found.high), abs=5e-5)


def test_figures_need_no_model_again(place: Path) -> None:
    before = (place / "out" / "tiny.csv").read_text()
    shutil.move(place / "hosts", place / "away")  # a host would be trained anew
    try:
        run(TABLE, arguments(place))
        assert (place / "out" / "tiny.csv").read_text() == before
        assert not (place / "hosts").exists()
    finally:
        shutil.rmtree(place / "hosts", ignore_errors=True)
        shutil.move(place / "away", place / "hosts")


def test_a_part_of_the_rows_leaves_the_others_alone(place: Path) -> None:
    before = Records.read("tiny", place / "out").rows
    run(TABLE, arguments(place, rows=["trained"], draws=[3]))
    after = Records.read("tiny", place / "out").rows
    assert set(after) - set(before) == {("trained", 3)}
    assert all(after[key] == line for key, line in before.items())
    assert after["trained", 3]["cost"] <= 1
    with pytest.raises(SystemExit, match="No row is called unknown"):
        run(TABLE, arguments(place, rows=["unknown"]))


def test_a_distilled_row_resumes_and_has_novelty(place: Path) -> None:
    run(TABLE, arguments(place, rows=["distilled"]))
    store = Store(place / "cache", Tiny(None, place / "hosts"))
    found = store.read("distilled", 0, methods.options_of(TABLE["rows"][5]))
    assert found.sets["test"]["logits"].shape == (60, 2, 10)
    assert found.sets["test"]["novelty"].shape == (60,)
    assert (store.place("distilled", 0) / "work" / "answers").is_dir()
    assert found.cost <= 1.07
    assert "ood/far/mean/novelty/AUROC" in Records.read("tiny", place / "out").rows["distilled", 0]


def test_other_options_are_not_read_from_the_cache(place: Path) -> None:
    store = Store(place / "cache", Tiny(None, place / "hosts"))
    assert store.read("MC dropout", 0, methods.options_of(TABLE["rows"][3])) is not None
    assert store.read("MC dropout", 0, {"method": "baseline", "baseline": "laplace"}) is None


def test_rows_of_recorded_masks_together_and_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "masks").mkdir(exist_ok=True)
    (place / "masks" / "tiny.json").write_text(
        '{"blocks": [3], "rows": {"a": [["1100", "0011"], ["1010", "0011"]]}}'
    )
    monkeypatch.setattr(methods, "MASKS", place / "masks")
    store = Store(place / "cache", Tiny(None, place / "hosts"))
    row = {"name": "masks", "method": "masks", "source": "a", "draws": 2}
    methods.prepare_masks(store, [row], None)
    for draw in (0, 1):
        together = store.read("masks", draw, methods.options_of(row))
        alone = methods.masks(store, row, draw)
        for name, tensors in alone.sets.items():
            assert together.sets[name]["logits"].allclose(tensors["logits"], atol=1e-5)
        assert together.cost == alone.cost
    with pytest.raises(Exception, match="has no 'b'"):
        methods.masks(store, {**row, "source": "b"}, 0)
