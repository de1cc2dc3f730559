"""The demo's table on several seeds: resumable, and honest about who is ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hydra_ensembles.cli import demo_steps as steps
from hydra_ensembles.cli.demo_steps import numbers
from hydra_ensembles.cli.main import main
from hydra_ensembles.evaluation import Results, evaluate
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.uncertainty import predict_from_logits


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
    assert "Mean of 2 seeds" in shown and "Seeds (of 2)" in shown
    both = json.loads((tmp_path / "seeds.json").read_text())
    assert (tmp_path / "seed-0" / "results-hydra.json").stat().st_mtime_ns == kept
    assert both["figures"]["Hydra"]["0"] == first["figures"]["Hydra"]["0"]
    assert both["figures"]["Hydra"]["0"] != both["figures"]["Hydra"]["1"]
    deep, knows = (both["figures"][name]["1"] for name in ("Deep Ensemble", "single + novelty"))
    assert deep["cost"] == pytest.approx(3 * knows["cost"]) and knows["cost"] < 1
    told = both["verdicts"]
    assert list(told) == ["single", "single + temperature", "single + novelty", "Deep Ensemble"]
    assert "outliers by novelty" not in told["single + temperature"]
    assert set(told["Deep Ensemble"]) == set(steps.COLUMNS.values())
    for verdict in told["Deep Ensemble"]["NLL"].values():
        assert verdict in ("better", "worse", "inconclusive")
    # a folder of an earlier version, without some of the models, is evaluated again
    (tmp_path / "seed-1" / "results-single-novelty.json").unlink()
    assert main([*order, "1"]) == 0
    assert (tmp_path / "seed-1" / "results-single-novelty.json").is_file()
    # other settings are another run
    assert main(["demo", "--epochs", "2", "-o", str(tmp_path), "--seeds", "0"]) != 0


class Scored:
    """Answers with stored logits, and with novelty where it has some."""

    def __init__(self, novelty: bool) -> None:
        self.novelty = novelty

    def predict(self, logits: Tensor) -> Prediction:
        found = predict_from_logits(logits)
        if not self.novelty:
            return found
        score = logits.abs().amax((1, 2))
        return replace(found, novelty_score=score, novelty=torch.zeros_like(score))


def results(name: str, *, noise: float, novelty: bool, far: float = 0.0) -> Results:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 4
    logits = 3.0 * torch.nn.functional.one_hot(labels, 4)[:, None]
    logits = logits + torch.randn(200, 1, 4, generator=draw)
    logits = logits + noise * torch.randn(200, 1, 4, generator=draw)
    odd = torch.randn(100, 1, 4, generator=draw) + far  # far: huge logits, no class favoured
    return evaluate(
        Scored(novelty),
        [(logits, labels)],
        ood={"letters": [odd]},
        progress=False,
        name=name,
    )


def test_novelty_is_not_compared_with_msp() -> None:
    """The same probabilities with and without novelty: the first is not ahead of the second."""
    single = results("single", noise=0.0, novelty=False)
    knows = results("Hydra", noise=0.0, novelty=True, far=100.0)
    assert knows["ood/mean/novelty/AUROC"] > single["ood/mean/AUROC"]
    told = steps.compared(knows, single)
    assert "better" not in told.values() and True not in told.values()
    assert "outliers by novelty" not in told
    same = steps.compared(knows, results("b", noise=0.0, novelty=True))
    assert same["outliers by novelty"] == "better"


def test_a_loss_is_told_and_a_tie_is_not() -> None:
    good = results("single", noise=0.0, novelty=False)
    near, bad = (results("Hydra", noise=noise, novelty=False) for noise in (0.15, 3.0))
    assert steps.compared(bad, good)["NLL"] == steps.compared(bad, good)["accuracy"] == "worse"
    gap = near["cls/Acc"] - good["cls/Acc"]
    assert gap != 0 and steps.compared(near, good)["accuracy"] == "inconclusive"
    lines = steps.verdict_table("x", {"single + novelty": {"NLL": "worse"}, "Deep Ensemble": {}})
    assert [line.split() for line in lines[:4]] == [
        ["x", "single", "Deep"],
        ["+", "novelty", "Ensemble"],
        ["accuracy", "–", "–"],
        ["NLL", "worse", "–"],
    ]


def test_what_is_new_stands_beside_what_one_model_was_sure_of() -> None:
    knows = Results("single", {"novelty/Alarms_5": 0.04, "ood/letters/novelty/Caught_5": 0.6})
    hydra = Results("Hydra", {"novelty/Alarms_5": 0.06, "ood/letters/novelty/Caught_5": 0.66})
    letters, digits = steps.answer({"letters": 0.47}, knows, hydra)[2:4]
    assert letters.split() == ["letters", "47%", "60%", "66%"] and "6%" in digits
