"""`hydra-ensembles fold`: saved models in, a folder for `from_pretrained` out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import ImageTransform, digits
from hydra_ensembles.hosts.tiny_vit import TinyViT
from tests.cli.conftest import CONFIG


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Save two hosts near each other, and one with its classes in another order."""
    root, folders = tmp_path_factory.mktemp("hosts"), []
    for number, names in enumerate(("0123456789", "0123456789", "9876543210")):
        host = TinyViT(CONFIG, seed=1).eval()
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in host.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        ensemble = hydra.fuse(host, [hydra.HeadMask.full(host)])
        ensemble.id2label = list(names)
        ensemble.transform = ImageTransform(16, None, "bilinear", mean=(0.5,), std=(0.5,))
        ensemble.save_pretrained(root / str(number))
        folders.append(str(root / str(number)))
    return folders


def test_saved_models_become_one_ensemble(
    hosts: list[str], shelf: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "folded"
    given = ["fold", *hosts[:2], "--data", str(shelf / "digits")]
    assert main([*given, "--held-out", str(shelf / "more"), "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["made_by"] == "fold" and said["examples"] == 64
    ensemble = hydra.HydraEnsemble.from_pretrained(out)
    assert ensemble.members == 2 and ensemble.novelty is not None
    assert ensemble.id2label is not None and ensemble.id2label[7] == "7"
    hydra.verify(ensemble, next(iter(digits(16, seed=0).test))["pixel_values"])
    assert (out / "config.yaml").exists()


def test_members_by_logits_and_a_student(
    hosts: list[str], shelf: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "folded"
    given = ["fold", *hosts[:2], "--data", str(shelf / "digits"), "-o", str(out), "--json"]
    assert main([*given, "--readout", "logits", "--student", "yes", "--max-cost", "1.2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["readout"] == "logits" and said["student"] is True
    ensemble = hydra.HydraEnsemble.from_pretrained(out)
    assert ensemble.student is not None and ensemble.member_readout is not None
    assert main([*given, "--max-cost", "0.1"]) == 5
    assert "max_cost=0.1 cannot be met" in capsys.readouterr().err


def test_novelty_takes_its_distances_from_the_data(
    hosts: list[str], shelf: Path, tmp_path: Path, capsys: Any
) -> None:
    given = ["fold", *hosts[:2], "--data", str(shelf / "digits"), "-o", str(tmp_path), "--json"]
    assert main([*given, "--novelty-from-data"]) == 2
    assert "--held-out" in capsys.readouterr().err
    assert main([*given, "--novelty-from-data", "--held-out", str(shelf / "more")]) == 0
    novelty = hydra.HydraEnsemble.from_pretrained(tmp_path).novelty
    assert novelty is not None and novelty.trained == 64


def test_what_cannot_be_folded_is_refused(
    hosts: list[str], shelf: Path, tmp_path: Path, capsys: Any
) -> None:
    data = ["--data", str(shelf / "digits"), "-o", str(tmp_path / "out")]
    assert main(["fold", hosts[0], hosts[2], *data]) == 4
    assert "another order" in capsys.readouterr().err
    assert main(["fold", hosts[0], *data]) == 4
    assert "two or more" in capsys.readouterr().err
    assert main(["fold", *hosts[:2], *data, "--trunk", "best"]) == 2
    assert "--trunk" in capsys.readouterr().err
    for option in ("--readout", "--student"):
        assert main(["fold", *hosts[:2], *data, option, "best"]) == 2
        assert option in capsys.readouterr().err
