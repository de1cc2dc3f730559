"""Saved == loaded to the last bit; a damaged or foreign folder gives a clear error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles._records import sealed
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.errors import FormatError
from hydra_ensembles.fusion import folder_reader as loading
from hydra_ensembles.fusion.folder_schema import DIGEST, FORMAT_VERSION
from hydra_ensembles.fusion.folder_writer import finish_saving
from tests import zoo
from tests.fusion.test_fusion import EARLY, TREE, perturbed

pytestmark = pytest.mark.filterwarnings("ignore:Model config")


@pytest.mark.parametrize("name", zoo.FUSABLE)
def test_saved_equals_loaded(name: str, tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host(name), TREE)
    ensemble.score = "energy" if "energy" in ensemble.task.scores else ensemble.task.default_score
    if ensemble.task.has_temperatures:
        ensemble.temperature = 1.25
    ensemble.record = {"seed": 3}
    ensemble.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["host"]["library"] != "custom"
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = ensemble.member_logits(zoo.batch(name))
        assert torch.equal(loaded.member_logits(zoo.batch(name)), expected)
    assert loaded.masks == ensemble.masks
    assert (loaded.temperature, loaded.score) == (ensemble.temperature, ensemble.score)
    assert loaded.record == {"seed": 3}
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("prepare", ["finetuned", "untied", "own MLPs", "loop", "bfloat16"])
def test_other_states_survive(prepare: str, tmp_path: Path) -> None:
    model = zoo.host("vit")
    if prepare == "finetuned":
        ensemble = hydra.fuse([perturbed(model, seed) for seed in range(3)], EARLY)
    else:
        ensemble = hydra.fuse(model, EARLY, mode="loop" if prepare == "loop" else "fused")
    if prepare in ("untied", "own MLPs"):
        ensemble.untie_(mlps=prepare == "own MLPs")
        with torch.no_grad():
            for place, parameter in enumerate(ensemble.body.branch[-1].parameters()):
                parameter += 0.01 * (place + 1)
    if prepare == "bfloat16":
        ensemble.to(torch.bfloat16)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    inputs = zoo.batch("vit").to(ensemble.dtype)
    with torch.no_grad():
        assert torch.equal(loaded.member_logits(inputs), ensemble.member_logits(inputs))
    assert loaded.mode == ensemble.mode
    if prepare != "bfloat16":
        hydra.verify(loaded, inputs)


def test_a_host_of_ones_own_is_given_when_loading(tmp_path: Path) -> None:
    class Mine(type(zoo.host("vit"))):  # type: ignore[misc]
        pass

    model = Mine(zoo.host("vit").config).eval()
    hydra.fuse(model, EARLY).save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="host=model"):
        HydraEnsemble.from_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path, host=Mine(model.config))
    hydra.verify(loaded, zoo.batch("vit"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    hydra.fuse(zoo.host("vit"), EARLY).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(sealed(config, DIGEST)))


def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(FormatError, match="SHA-256"):
        HydraEnsemble.from_pretrained(folder)


def test_tampered_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(FormatError, match="changed"):
        HydraEnsemble.from_pretrained(folder)


def test_missing_and_foreign_files(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(FormatError, match=r"no model\.safetensors"):
        HydraEnsemble.from_pretrained(folder)
    zoo.host("vit").save_pretrained(tmp_path / "host")
    with pytest.raises(FormatError, match="not the config of a Hydra ensemble"):
        HydraEnsemble.from_pretrained(tmp_path / "host")
    with pytest.raises(FormatError, match="No folder"):
        HydraEnsemble.from_pretrained(tmp_path / "nowhere")


def test_newer_and_older_formats(folder: Path) -> None:
    major = FORMAT_VERSION[0]
    edit(folder, format_version=[major, 99], shiny="new")
    with pytest.warns(UserWarning, match="shiny"):
        HydraEnsemble.from_pretrained(folder)
    edit(folder, format_version=[major + 1, 0])
    with pytest.raises(FormatError, match="Upgrade"):
        HydraEnsemble.from_pretrained(folder)
    edit(folder, format_version=[1, 2])
    with pytest.raises(FormatError, match=r"format 1\.2.*Build or fuse the ensemble again"):
        HydraEnsemble.from_pretrained(folder)


def test_a_class_outside_the_list_is_not_built(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["host"]["class"] = "os.system"
    edit(folder, host=config["host"])
    with pytest.raises(FormatError, match="not on the list"):
        HydraEnsemble.from_pretrained(folder)


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"format": "hydra-ensembles", ')
    with pytest.raises(FormatError, match="damaged"):
        HydraEnsemble.from_pretrained(folder)


def test_processors_are_copied_along(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    hydra.fuse(zoo.host("vit"), EARLY).save_pretrained(
        tmp_path, image_processor=ViTImageProcessor(size={"height": 16, "width": 16})
    )
    assert (tmp_path / "preprocessor_config.json").exists()


def test_unfinetuned_members_cost_no_disk(tmp_path: Path) -> None:
    model = zoo.host("bert")
    masks = [hydra.HeadMask.random(model, keep=3, seed=s) for s in range(3)]
    ensemble = hydra.fuse(model, masks)
    ensemble.save_pretrained(tmp_path)
    on_disk = (tmp_path / "model.safetensors").stat().st_size
    host = sum(p.numel() * p.element_size() for p in model.parameters())
    header = 16_000  # names and offsets, a few kilobytes whatever the size of the model
    assert on_disk - header <= 1.01 * host
    assert ensemble.parameter_bytes()["memory"] >= on_disk - header


# --- several processes ---------------------------------------------------------------------------


def two_ensembles() -> list[HydraEnsemble]:
    """Return two ensembles of the same shapes, with other weights, masks and temperatures."""
    from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

    made = []
    for number in range(2):
        host = TinyViT(TinyViTConfig(layers=2, heads=4), seed=number).eval()
        kept = [[1, 0, 1, 0], [0, 1, 0, 1]][number]
        rows = [[1, 1, 1, 1], kept], [[1, 1, 1, 1], kept[::-1]]
        made.append(hydra.fuse(host, [hydra.HeadMask(mask) for mask in rows]))
        made[-1].temperature = 1.5 + number
    return made


def parts_of(ensemble: HydraEnsemble) -> tuple[Any, ...]:
    return model_fingerprint(ensemble.host), ensemble.masks, ensemble.temperature


def test_saves_at_once_leave_one_ensemble(tmp_path: Path) -> None:
    """Threads stand for processes: both have staging folders and locks of their own."""
    ensembles = two_ensembles()
    known = [parts_of(ensemble) for ensemble in ensembles]
    with ThreadPoolExecutor(4) as pool:
        for number in range(5):
            saves = [pool.submit(e.save_pretrained, tmp_path / str(number)) for e in ensembles * 2]
            for save in saves:
                save.result()
            assert parts_of(HydraEnsemble.from_pretrained(tmp_path / str(number))) in known
            hidden = [path.name for path in (tmp_path / str(number)).glob(".*")]
            assert hidden == []


def test_a_save_while_a_folder_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are replaced after they were checked and before they are read."""
    old, new = two_ensembles()
    old.save_pretrained(tmp_path)
    check, saves = loading.check_files, [new]

    def check_then_save(*arguments: Any) -> None:
        check(*arguments)
        if saves:
            saves.pop().save_pretrained(tmp_path)

    monkeypatch.setattr(loading, "check_files", check_then_save)
    assert parts_of(HydraEnsemble.from_pretrained(tmp_path)) == parts_of(new)


def test_a_tokenizer_of_another_save_is_refused(tmp_path: Path) -> None:
    """It is read when it is first needed, which may be after another process has saved."""
    from tests.fusion.test_inputs import words

    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(tmp_path)
    ensemble.save_pretrained(tmp_path / "saved")
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved")
    ensemble.tokenizer.model_max_length = 7
    ensemble.save_pretrained(tmp_path / "saved")
    with pytest.raises(FormatError, match="load it again"):
        _ = loaded.tokenizer


def test_a_save_killed_between_two_renames_can_be_finished(tmp_path: Path) -> None:
    old, new = two_ensembles()
    old.save_pretrained(tmp_path / "folder")
    new.save_pretrained(tmp_path / "new")
    code = (
        "import os, signal, sys\n"
        "from hydra_ensembles import HydraEnsemble\n"
        "from hydra_ensembles.hosts import tiny_vit\n"
        "rename, done = os.replace, []\n"
        "def die_after_the_first(source, target):\n"
        "    if done:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.append(rename(source, target))\n"
        "ensemble = HydraEnsemble.from_pretrained(sys.argv[1])\n"
        "os.replace = die_after_the_first\n"
        "ensemble.save_pretrained(sys.argv[2])\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "new"), str(tmp_path / "folder")]
    assert subprocess.run(run).returncode == -signal.SIGKILL
    assert (tmp_path / "folder" / ".lock").exists()
    with pytest.raises(FormatError, match="saving was interrupted"):
        HydraEnsemble.from_pretrained(tmp_path / "folder")
    assert finish_saving(tmp_path / "folder")
    assert parts_of(HydraEnsemble.from_pretrained(tmp_path / "folder")) == parts_of(new)
    assert [name for name in os.listdir(tmp_path / "folder") if name.startswith(".")] == []
