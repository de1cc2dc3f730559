"""The demo's table on several seeds: resumable, and honest about who is ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydra_ensembles.cli import demo_steps as steps
from hydra_ensembles.cli.demo_seeds import numbers
from hydra_ensembles.cli.main import main
from hydra_ensembles.evaluation import Results


def test_seeds_are_read() -> None:
    assert numbers("0-2, 7,1") == [0, 1, 2, 7]
    assert main(["demo", "--seeds", "some"]) == 2


@pytest.mark.slow
def test_it_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ["demo", "--epochs", "1", "-o", str(tmp_path), "--seeds"]
    assert main([*order, "0"]) == 0
    capsys.readouterr()
    first = json.loads((tmp_path / "seeds.json").read_text())
    kept = (tmp_path / "seed-0" / "results-hydra.json").stat().st_mtime_ns
    assert main([*order, "0,1"]) == 0
    shown = capsys.readouterr().out
    assert "Mean of 2 seeds" in shown and "Hydra ahead of single on so many of 2 seeds" in shown
    both = json.loads((tmp_path / "seeds.json").read_text())
    assert (tmp_path / "seed-0" / "results-hydra.json").stat().st_mtime_ns == kept
    assert both["figures"]["Hydra"]["0"] == first["figures"]["Hydra"]["0"]
    assert both["figures"]["Hydra"]["0"] != both["figures"]["Hydra"]["1"]
    assert both["figures"]["Deep Ensemble"]["1"]["cost"] == 3
    for column, won in both["ahead_of"]["single"].items():
        for seed in ("0", "1"):
            hydra, single = (both["figures"][name][seed] for name in ("Hydra", "single"))
            if column == "NLL":
                assert (hydra["cls/NLL"] < single["cls/NLL"]) is (int(seed) in won)
    # other settings are another run
    assert main(["demo", "--epochs", "2", "-o", str(tmp_path), "--seeds", "0"]) != 0


def test_a_loss_is_told() -> None:
    figures = {"cls/Acc": 0.9, "cls/NLL": 0.2, "cal/aECE": 0.01, "fail/AUROC": 0.9, "sc/AURC": 0.1}
    one = Results("single", {**figures, "ood/mean/AUROC": 0.8})
    other = Results("Deep Ensemble", {**figures, "ood/mean/AUROC": 0.99})
    worse = {**figures, "cls/Acc": 0.8, "cls/NLL": 0.1, "ood/mean/AUROC": 0.7}
    hydra = Results("Hydra", {**worse, "ood/mean/novelty/AUROC": 0.9})
    lines = steps.verdict(one, hydra, other)
    assert lines[0] == "Hydra against single: better in NLL, outlier detection; behind in accuracy."
    assert lines[1].endswith("better in NLL; behind in accuracy, outlier detection.")


def test_what_is_new_stands_beside_what_one_model_was_sure_of() -> None:
    hydra = Results("Hydra", {"novelty/Alarms_5": 0.06, "ood/letters/novelty/Caught_5": 0.66})
    letters, digits = steps.answer({"letters": 0.47}, hydra)[2:4]
    assert letters.split() == ["letters", "47%", "66%"] and "6%" in digits
