"""`hydra-ensembles prune`: a model in, a smaller one of the same class out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import digits
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.tiny_vit import TinyViT
from tests import zoo


def test_a_saved_model_becomes_a_smaller_one(shelf: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "half"
    given = ["prune", str(shelf / "host"), "--data", str(shelf / "digits"), "-o", str(out)]
    assert main([*given, "--max-cost", "0.6", "--held-out", str(shelf / "more"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["made_by"] == "prune" and 0.5 < said["cost"] <= 0.6
    assert set(said["held_out"]) == {"dense", "pruned"}
    model = hydra.load(out)
    assert isinstance(model, TinyViT) and max(host_model(model).neuron_counts) < 24
    images = next(iter(digits(16, seed=0).test))["pixel_values"]
    whole = hydra.load(shelf / "host")
    assert isinstance(whole, hydra.HydraEnsemble)
    ratio = hydra.cost(model, images).relative_to(hydra.cost(whole.member(0), images))
    assert ratio.multiply_adds <= 0.6
    assert (out / "config.yaml").exists() and not (out / "steps").exists()
    assert main(["eval", str(out), "--data", str(shelf / "more"), "--json"]) == 0
    assert main([*given, "--max-cost", "0.5"]) == 0  # other settings start over
    assert "pruned" in capsys.readouterr().out


def test_equal_widths_are_written_for_transformers(tmp_path: Path, capsys: Any) -> None:
    from transformers import BertForSequenceClassification, BertTokenizerFast

    words = [f"w{number}" for number in range(90)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
    zoo.make("bert").save_pretrained(tmp_path / "bert")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    texts = [f"w{i % 90} w{i * 7 % 90} w{i * 11 % 90}" for i in range(120)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    out = tmp_path / "narrow"
    given = ["prune", str(tmp_path / "bert"), "--data", str(tmp_path / "texts.txt"), "--uniform"]
    assert main([*given, "--max-cost", "0.8", "-o", str(out)]) == 0
    assert "cost" in capsys.readouterr().out
    model = BertForSequenceClassification.from_pretrained(out)
    assert model.config.intermediate_size < 48
    assert main(["explain", str(out)]) == 0


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        (["--max-cost", "0.01"], 5, "cannot be met"),
        (["--max-cost", "2"], 5, "max_cost=2"),
        (["--uniform"], 4, "only models of transformers"),
        (["--criterion", "hies"], 3, "neurons have none"),
    ],
)
def test_what_cannot_be_done_is_refused(
    option: list[str], code: int, message: str, shelf: Path, tmp_path: Path, capsys: Any
) -> None:
    given = ["prune", str(shelf / "host"), "--data", str(shelf / "digits")]
    assert main([*given, "-o", str(tmp_path), *option]) == code
    assert message in capsys.readouterr().err
