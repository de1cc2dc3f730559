"""Every field of a folder is checked before anything is built; what was saved is what is loaded."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles._records import sealed, sha256_of_file
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.errors import FormatError
from hydra_ensembles.fusion.folder_schema import DIGEST, Config, read_config
from hydra_ensembles.fusion.folder_writer import SAVING, finish_saving
from hydra_ensembles.hosts.architecture import rebuild_host
from tests import zoo
from tests.fusion.test_fusion import EARLY, TREE
from tests.loose_files import load

pytestmark = pytest.mark.filterwarnings("ignore:Model config")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ensemble = hydra.fuse(zoo.host("vit"), TREE)
    ensemble.temperature, ensemble.member_temperatures = 1.5, [1.2] * ensemble.members
    ensemble.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(sealed(config, DIGEST) if sign else config))


def test_a_config_that_was_changed_by_hand_is_refused(folder: Path) -> None:
    rewrite(folder, lambda c: c.update(temperature=2.0), sign=False)
    with pytest.raises(FormatError, match="changed after it was saved"):
        HydraEnsemble.from_pretrained(folder)
    rewrite(folder, lambda c: c.pop(DIGEST), sign=False)
    with pytest.raises(FormatError, match=f"missing required field `{DIGEST}`"):
        HydraEnsemble.from_pretrained(folder)


def test_spacing_does_not_matter(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    HydraEnsemble.from_pretrained(folder)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "temperature is -1.0: expected": lambda c: c.update(temperature=-1.0),
    "temperature is '1.0': expected": lambda c: c.update(temperature="1.0"),
    "temperature is nan: expected": lambda c: c.update(temperature=float("nan")),
    "temperature is True: expected": lambda c: c.update(temperature=True),
    "2 member_temperatures for 4": lambda c: c.update(member_temperatures=[1.0, 2.0]),
    "Unknown score 'mps'. Did you mean 'msp'": lambda c: c.update(score="mps"),
    "mode is 'both': expected one of fused, loop": lambda c: c.update(mode="both"),
    "labels is {'1'": lambda c: c["labels"].pop("0"),
    "has 4 class names, but the model has 5": lambda c: c["labels"].pop("4"),
    "masks[0][0][0] is 2: expected `int` <= 1": lambda c: c["masks"][0][0].__setitem__(0, 2),
    "masks differ": lambda c: c["masks"][1].pop(),
    "trunk keeps other heads": lambda c: [m[0].__setitem__(0, 0) for m in c["masks"]],
    "by its mask": lambda c: c["masks"][2].__setitem__(2, [1, 1, 1, 1]),
    "does not take the": lambda c: c["plan"]["layers"][1]["parents"].__setitem__(0, 7),
    "same head twice": lambda c: c["plan"]["layers"][1]["heads"][0].__setitem__(0, 1),
    "streams that are not there": lambda c: c["plan"]["streams"].__setitem__(0, 9),
    "names a member beyond": lambda c: c["plan"]["layers"][0]["members"].__setitem__(0, 9),
    "1.norm2 has 5 copies, expected one of [1, 2]": lambda c: c["copies"].update({"1.norm2": 5}),
    "copies has '1.nothing', expected": lambda c: c["copies"].update({"1.nothing": 2}),
    "readout.tokens is -1: expected": lambda c: c["readout"].update(tokens=-1),
    "all tokens are read": lambda c: c["readout"].update(tokens=None),
    "dtype in config.json is float16, but": lambda c: c.update(dtype="float16"),
    "dtype is 'int8': expected one of": lambda c: c.update(dtype="int8"),
    "say that the tensor 'a' is 'b'": lambda c: c.update(aliases={"a": "b"}),
    "files has '../../secret', expected the name": lambda c: c.update(
        files={"../../secret": "0" * 64}
    ),
    "blocks at 'elsewhere'": lambda c: c.update(blocks_path="elsewhere"),
    "family 'bert'": lambda c: c.update(family="bert"),
    "num_hidden_layers = 3000": lambda c: c["host"]["config"].update(num_hidden_layers=3000),
    "hidden_size = 1e+09": lambda c: c["host"]["config"].update(hidden_size=10**9),
    "Cannot build the host": lambda c: c["host"]["config"].update(hidden_act="gleu"),
    "does not fit the host": lambda c: c["host"]["config"].update(intermediate_size=60_000),
    "policy is {'threshold'": lambda c: c.update(policy={"threshold": 0.1}),
    "engine is 'neither': expected one of fused, host": lambda c: c["switches"].update(
        engine="neither"
    ),
    "rotary is 'round', expected some of": lambda c: c["switches"].update(rotary="round"),
    "switches.share_trunk is 1: expected `bool`": lambda c: c["switches"].update(share_trunk=1),
    "needs folds and cuts": lambda c: c["switches"].update(engine="host"),
    "not have one cut for each": lambda c: c["switches"].update(engine="host", folds=True, cuts=[]),
    "host.buffers[...] is {'a': 'int8'}: expected one of": lambda c: c["host"].update(
        buffers={"a": "int8"}
    ),
    "plan.layers[0].shared is 1: expected `bool`": lambda c: c["plan"]["layers"][0].update(
        shared=1
    ),
    "image_transform is {'size'": lambda c: c.update(image_transform={"size": -5}),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_field_is_refused_by_its_name(folder: Path, words: str) -> None:
    rewrite(folder, WRONG[words])
    with pytest.raises(FormatError) as refused:
        HydraEnsemble.from_pretrained(folder)
    assert words in str(refused.value)


LOADS = {
    **{key: {} for key in ("copies", "switches", "aliases", "libraries", "files", "record")},
    **dict.fromkeys(("temperature", "member_temperatures", "labels", "policy", "novelty")),
    "image_transform": None,
    "task": None,
    "sets": None,
    "calibrator": None,
    "merged": [],
    "readouts": None,
}
"""The one value of those below that a field may have: it is empty, or not set."""

SAYS = {
    "format": "is not the config of a Hydra ensemble",
    "format_version": "has the format version {value}; expected two numbers",
    DIGEST: "was changed after it was saved",
    ("family", "x"): "describes x blocks at",
    ("blocks_path", "x"): "blocks at 'x', but",
    ("score", "x"): "Unknown score 'x'. Known: energy",
    ("mode", "x"): "mode is 'x': expected one of fused, loop",
    ("dtype", "x"): "dtype is 'x': expected one of float32, bfloat16, float16, float64",
    ("sha256", "x"): "sha256 is 'x': expected `str` matching regex",
    ("temperature", -3): "temperature is -3: expected `float` >= 0.0001",
    ("temperature", 1e400): "temperature is inf: expected `float` <= 10000.0",
    ("masks", "[]"): "masks is []: expected `array` of length >= 1",
    ("member_temperatures", "[]"): "there are 0 member_temperatures for 4 members",
    ("labels", "{}"): "labels is {{}}, expected the classes from 0",
    ("policy", "{}"): "policy",
    ("sets", "{}"): "sets is {{}}: Not valid sets",
    ("calibrator", "{}"): "calibrator is {{}}: expected a calibrator with its name",
    ("task", "{}"): "task is {{}}: expected a task with its name",
    ("novelty", "{}"): "novelty and the file novelty.safetensors belong together",
    ("image_transform", "{}"): "image_transform is {{'exif_orientation': False}}, expected all",
    ("plan", "{}"): "plan is {{}}: object missing required field `trunk`",
    ("readout", "{}"): "readout is {{}}: object missing required field `tokens`",
    ("readouts", "{}"): "readouts is {{}}: object missing required field `second`",
    ("host", "{}"): "host is {{}}: object missing required field `library`",
    ("masks", "[[{'a': None}]]"): "masks[0][0] is {{'a': None}}: expected `array`, got `object`",
    ("merged", "[[{'a': None}]]"): "merged[0] is [{{'a': None}}]: expected `str`, got `array`",
    ("member_temperatures", "[[{'a': None}]]"): "member_temperatures[0] is [{{'a': None}}]: expec",
}
"""What is said instead of the field, the value and the type that was expected."""


@pytest.mark.parametrize("name", Config.__struct_fields__)
@pytest.mark.parametrize("value", [[], {}, -3, "x", [[{"a": None}]], 1e400, None], ids=repr)
def test_a_damaged_field_says_what_was_found_and_expected(
    folder: Path, name: str, value: Any
) -> None:
    rewrite(folder, lambda c: c.update({name: value}), sign=name != DIGEST)
    if name in LOADS and value == LOADS[name]:
        HydraEnsemble.from_pretrained(folder).predict(zoo.batch("vit"))
        return
    key = repr(value) if isinstance(value, (list, dict)) else value
    usual = "{name} is {value}: expected `"
    words = SAYS.get(name) or SAYS.get((name, key)) or usual
    with pytest.raises(FormatError) as refused:
        HydraEnsemble.from_pretrained(folder)
    assert words.format(name=name, value=repr(value)) in str(refused.value)


def test_an_absurd_size_costs_no_memory(folder: Path) -> None:
    """The host is compared on the meta device: 60,000 wide, its MLPs alone would take gigabytes."""
    import resource

    rewrite(folder, lambda c: c["host"]["config"].update(intermediate_size=60_000))
    rewrite(folder, lambda c: c["host"]["config"].update(hidden_size=60_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match="does not fit the host"):
        HydraEnsemble.from_pretrained(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_every_file_is_under_a_checksum(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    ensemble.transform = ViTImageProcessor(size={"height": 16, "width": 16})
    ensemble.save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(path.read_text().replace("0.5", "0.1"))
    with pytest.raises(FormatError, match=r"preprocessor_config\.json is not the file"):
        HydraEnsemble.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(FormatError, match=r"no preprocessor_config\.json"):
        HydraEnsemble.from_pretrained(tmp_path)


def test_a_failed_save_leaves_the_folder_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ensemble = HydraEnsemble.from_pretrained(folder)
    other = copy.deepcopy(ensemble)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.policy = hydra.Policy(threshold=0.1, score="energy")
    with pytest.raises(FormatError, match="the policy is about 'energy'"):
        other.save_pretrained(folder)
    other.policy = hydra.Policy(alarm=0.1)
    with pytest.raises(FormatError, match="no statistics of known data"):
        other.save_pretrained(folder)
    other.policy = None

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        other.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_end_between_two_renames_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = HydraEnsemble.from_pretrained(folder)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    rename, done = os.replace, []

    def die_after_the_first(source: Any, target: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(rename(source, target))

    monkeypatch.setattr(os, "replace", die_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(folder)
    monkeypatch.undo()
    with pytest.raises(FormatError, match="saving was interrupted"):
        HydraEnsemble.from_pretrained(folder)
    assert finish_saving(folder) and not finish_saving(folder)
    assert model_fingerprint(HydraEnsemble.from_pretrained(folder)) == model_fingerprint(other)
    assert not (folder / SAVING).exists()


def test_half_a_save_is_not_finished(folder: Path) -> None:
    before = HydraEnsemble.from_pretrained(folder).masks
    (folder / SAVING).mkdir()
    shutil.copy(folder / "config.json", folder / SAVING)
    (folder / SAVING / "model.safetensors").write_bytes(b"half a file")
    assert not finish_saving(folder)
    assert HydraEnsemble.from_pretrained(folder).masks == before


def test_files_of_an_older_save_go(folder: Path) -> None:
    from transformers import ViTImageProcessor

    ensemble = HydraEnsemble.from_pretrained(folder)
    ensemble.transform = ViTImageProcessor(size={"height": 16, "width": 16})
    ensemble.save_pretrained(folder)
    assert (folder / "preprocessor_config.json").is_file()
    ensemble.transform = None
    ensemble.save_pretrained(folder)
    assert not (folder / "preprocessor_config.json").exists()
    HydraEnsemble.from_pretrained(folder)


def test_nothing_outside_the_folder_is_read(folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        with pytest.raises(FormatError, match="leads out of its folder"):
            HydraEnsemble.from_pretrained(folder)
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)
    rewrite(folder, lambda config: config["files"].update({"../secret": "0" * 64}))
    with pytest.raises(FormatError, match="expected the name of a file"):
        HydraEnsemble.from_pretrained(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert HydraEnsemble.from_pretrained(snapshot).members == 4


def test_a_tokenizer_names_no_code_and_no_other_files(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = load("benchmarks/fuzz_records.py").text_tokenizer()
    ensemble.save_pretrained(tmp_path)
    assert HydraEnsemble.from_pretrained(tmp_path).tokenizer is not None
    (tmp_path / "added_tokens.json").write_text('{"new": 3}')
    with pytest.raises(FormatError, match=r"added_tokens\.json was not there"):
        HydraEnsemble.from_pretrained(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for change, problem in (
        ({"auto_map": {"AutoTokenizer": "code.Mine"}}, "are not loaded"),
        ({"vocab_file": "/etc/passwd"}, "are not loaded"),
        ({"model_max_length": -5}, "model_max_length"),
        ({"model_max_length": True}, "model_max_length"),
        ({"model_max_length": "long"}, "model_max_length"),
    ):
        path.write_text(json.dumps({**settings, **change}))
        digest = sha256_of_file(path)
        rewrite(tmp_path, lambda config, d=digest: config["files"].update({path.name: d}))
        with pytest.raises(FormatError, match=problem):
            HydraEnsemble.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.4.0.0.json", "source.spm"])
def test_a_file_for_transformers_that_was_not_saved(name: str, folder: Path) -> None:
    (folder / name).write_text('{"new": 3}')
    with pytest.raises(FormatError, match="was not there"):
        HydraEnsemble.from_pretrained(folder)


def test_a_policy_is_whole(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    images = zoo.batch("vit", 16)
    labelled = [(images, ensemble.predict(images).class_index)]
    hydra.fit_policy(ensemble, labelled, risk=0.5, alarm=None, progress=False)
    ensemble.save_pretrained(tmp_path)
    assert HydraEnsemble.from_pretrained(tmp_path).policy == ensemble.policy
    for key in ensemble.policy.to_dict():
        whole = (tmp_path / "config.json").read_text()
        rewrite(tmp_path, lambda config, k=key: config["policy"].pop(k))
        with pytest.raises(FormatError, match="policy is"):
            HydraEnsemble.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(whole)


def test_a_config_fetches_no_kernel_and_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    kernel = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel"}
    rewrite(folder, lambda config: config["host"]["config"].update(kernel))
    host = HydraEnsemble.from_pretrained(folder).host
    assert host.config._attn_implementation in ("eager", "sdpa")
    description = {
        "library": "timm-name",
        "class": "VisionTransformer",
        "architecture": "vit_tiny_patch16_224",
        "arguments": {"num_classes": 3, "checkpoint_path": "/etc/passwd"},
    }
    with pytest.raises(FormatError, match="checkpoint_path"):
        rebuild_host(description)


def test_a_part_in_another_precision_comes_back(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY).to(torch.bfloat16)
    ensemble.host.vit.layernorm.float()
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.host.vit.layernorm.weight.dtype == torch.float32
    assert loaded.dtype == torch.bfloat16


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(FormatError, match="is a file"):
        hydra.fuse(zoo.host("vit"), EARLY).save_pretrained(tmp_path / "file")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="damaged"):
        read_config(tmp_path)
