"""`eval` and its page for every task: an ensemble with sets against its plain, calibrated host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import load_data
from hydra_ensembles.report.set_figures import sets
from tests.tasks.test_task_doors import FEELINGS, NAMES, host, write
from tests.tasks.test_tasks import EARLY, fast_tokenizer

FIGURE = {"labels": "mAP", "pairs": "RMSE", "number": "RMSE", "numbers": "RMSE"}
FIGURE |= {"tags": "entity F1", "questions": "exact match"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "encoder"])
def test_a_report_compares_an_ensemble_with_its_host(name: str, tmp_path: Path) -> None:
    made, tokenizer = hydra.fuse(host(name), EARLY), fast_tokenizer()
    host(name).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made.tokenizer = tokenizer
    made.save_pretrained(tmp_path / "ensemble")
    data = str(write(name, ".jsonl", tmp_path))
    coverage = 0.3 if name == "questions" else 0.6
    folder = str(tmp_path / "ensemble")
    assert main(["sets", folder, "--held-out", data, "--coverage", str(coverage)]) == 0
    models = [f"{name}={tmp_path / name}" for name in ("ensemble", "model")]
    options = ["--data", data, "--calibration", data, "--bootstrap", "10"]
    assert main(["eval", *models, *options, "-o", str(tmp_path / "found")]) == 0
    page = (tmp_path / "found" / "report.html").read_text()
    assert FIGURE.get(name, "accuracy") in page and "Sets with a guarantee</h2>" in page
    ours, theirs = (
        json.loads((tmp_path / "found" / f"results-{model}.json").read_text())["figures"]
        for model in ("ensemble", "model")
    )
    assert ours["set/Coverage"] >= coverage and "set/Coverage" not in theirs
    shared = ours.keys() & theirs.keys()
    assert {"reg/RMSE"} <= shared if FIGURE.get(name) == "RMSE" else {"cls/Acc"} <= shared


def test_classes_in_the_report_have_their_names(tmp_path: Path) -> None:
    made, tokenizer = hydra.fuse(host("classes"), EARLY), fast_tokenizer()
    made.tokenizer = tokenizer
    data = load_data(
        write("classes", ".jsonl", tmp_path), tokenizer=tokenizer, class_names=FEELINGS
    )
    hydra.fit_sets(made, data, coverage=0.6, progress=False)
    results = hydra.evaluate(made, data, bootstrap=0, progress=False)
    assert results.settings["sets"]["classes"] == FEELINGS
    section = sets([results], [results.name])
    assert section is not None
    (model,) = section.content["models"]
    assert {row["name"] for row in model["tables"]["class"]} <= set(FEELINGS)
