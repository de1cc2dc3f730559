"""Models as people have them: checkpoints of torch, timm folders, and files that are neither."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

timm = pytest.importorskip("timm")
NAME = "vit_tiny_patch16_224"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from hydra_ensembles.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return timm.create_model(NAME, pretrained=False, num_classes=5)


@pytest.mark.parametrize("ending", [".pth", ".pth.tar", ".bin"])
def test_a_checkpoint_is_read(ending: str, tmp_path: Path, model: torch.nn.Module) -> None:
    from hydra_ensembles.cli.models import load_model

    file = tmp_path / f"best{ending}"
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, file)
    loaded = load_model(f"timm:{NAME}@{file}").model
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_a_checkpoint_of_timms_trainer_is_read(tmp_path: Path, model: torch.nn.Module) -> None:
    from hydra_ensembles.cli.checkpoints import advice
    from hydra_ensembles.cli.models import load_model

    file = tmp_path / "model_best.pth.tar"
    arguments = argparse.Namespace(model=NAME, lr=1e-3, resume="", mean=None)
    weights = {"state_dict": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}}
    torch.save({"epoch": 3, "arch": NAME, "args": arguments, "metric": 0.7, **weights}, file)
    loaded = load_model(f"timm:{NAME}@{file}").model
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert f"give timm:{NAME}@{file}" in advice(file)


class Runs:
    """Unpickled, it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, model: torch.nn.Module) -> None:
    from hydra_ensembles.cli.checkpoints import read_weights
    from hydra_ensembles.errors import FormatError

    file = tmp_path / "best.pth.tar"
    arguments = argparse.Namespace(model=Runs(tmp_path / "ran"))
    torch.save({"args": arguments, "state_dict": model.state_dict()}, file)
    with pytest.raises(FormatError, match="not read"):
        read_weights(file)
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    file = tmp_path / "model.pth"
    torch.save(model, file)
    ended = run("explain", f"timm:{NAME}@{file}")
    assert ended.returncode == 5
    assert "torch.save(model.state_dict()" in ended.stderr and "Traceback" not in ended.stderr


def test_a_file_is_not_a_hub_name(tmp_path: Path, model: torch.nn.Module) -> None:
    file = tmp_path / "best.pth"
    torch.save(model.state_dict(), file)
    ended = run("explain", file)
    assert ended.returncode == 4
    assert f"timm:NAME@{file}" in ended.stderr and NAME in ended.stderr


def test_a_file_that_is_not_there_is_not_a_hub_name(tmp_path: Path) -> None:
    from hydra_ensembles.cli.models import load_model
    from hydra_ensembles.errors import DataError

    for name in ("nowhere.pth", f"timm:{NAME}@nowhere.pth", str(tmp_path / "nowhere")):
        with pytest.raises(DataError, match="There is no"):
            load_model(name)


def test_a_folder_of_checkpoints_says_what_works(tmp_path: Path, model: torch.nn.Module) -> None:
    from hydra_ensembles.cli.models import load_model
    from hydra_ensembles.errors import UnsupportedModelError

    torch.save({"arch": NAME, "state_dict": model.state_dict()}, tmp_path / "last.pth.tar")
    with pytest.raises(UnsupportedModelError, match=f"give timm:{NAME}@.*last.pth.tar"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["timm/vit_not_there", "hf-hub:timm/vit_not_there"])
def test_the_hubs_models_of_timm_go_to_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from hydra_ensembles.cli.models import load_model
    from hydra_ensembles.errors import UnsupportedModelError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModelError, match="timm:hf-hub:timm/vit_not_there"):
        load_model(name)


def test_a_timm_folder_is_recognised_by_its_config(tmp_path: Path, model: torch.nn.Module) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": NAME, "num_classes": 5}))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ended = run("explain", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "can be fused" in ended.stdout


def test_a_transformers_folder_with_a_bin_file(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from hydra_ensembles.cli.models import load_model

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=3, architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    host = BertForSequenceClassification(config)
    config.save_pretrained(tmp_path)
    torch.save(host.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load_model(str(tmp_path))
    assert torch.equal(loaded.model.classifier.weight, host.classifier.weight)
    assert not loaded.untrained


def test_help_names_the_forms() -> None:
    shown = " ".join(run("explain", "--help").stdout.replace("│", " ").split())
    assert "timm:NAME@FILE" in shown and ".pth" in shown
