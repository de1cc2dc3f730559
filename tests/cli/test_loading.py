"""Models and data by name: the hub's cache without a network, weights of one's own, classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.cli.class_names import check_labels
from hydra_ensembles.cli.commands.try_command import _load
from hydra_ensembles.cli.errors import one_line
from hydra_ensembles.cli.hub_models import hub_access, reachable
from hydra_ensembles.cli.inputs import Reading
from hydra_ensembles.cli.main import main
from hydra_ensembles.cli.models import Loaded, check_sources, load_model, load_set, load_sets
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import DataError, FormatError, UnsupportedModelError
from tests import zoo
from tests.fusion.hub_server import serving
from tests.fusion.test_folder_format import rewrite
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_hub import run
from tests.fusion.test_inputs import words

from .conftest import write_picture
from .test_errors import said

NOWHERE = "https://no-such-host.invalid"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Point the hub's client at a host that does not exist, with a cache of our own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_an_unreachable_hub_is_told_from_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert not reachable(NOWHERE) and reachable("http://localhost:1")
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    assert reachable(NOWHERE)


def test_offline_lasts_as_long_as_the_loading(no_hub: Path) -> None:
    from huggingface_hub import is_offline_mode

    before = is_offline_mode()
    with hub_access() as reached:
        assert not reached and is_offline_mode()
    assert is_offline_mode() is before


def test_a_hub_name_without_network(no_hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["explain", "someone/some-model"]) == 4
    lines = said(capsys.readouterr().err)
    assert len(lines) == 1 and "cannot be reached" in lines[0] and str(no_hub) in lines[0]


def test_offline_by_wish_is_told_from_an_unreachable_hub(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["explain", "someone/some-model"]) == 4
    lines = said(capsys.readouterr().err)
    assert len(lines) == 1 and "HF_HUB_OFFLINE is set" in lines[0] and str(no_hub) in lines[0]


def test_a_hub_name_in_the_cache(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_labels=2,
    )
    place = no_hub / "models--someone--some-model"
    transformers.ViTForImageClassification(config).save_pretrained(place / "snapshots" / "1")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1")
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(no_hub))
    loaded = load_model("someone/some-model")
    assert type(loaded.model).__name__ == "ViTForImageClassification"


def test_timm_weights_of_ones_own(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    name, file = "vit_tiny_patch16_224", tmp_path / "weights.safetensors"
    model = timm.create_model(name, pretrained=False, num_classes=3)
    save_file(model.state_dict(), file)
    loaded = load_model(f"timm:{name}@{file}")
    assert loaded.model.num_classes == 3 and loaded.class_names is None
    torch.testing.assert_close(loaded.model.head.weight, model.head.weight)
    with pytest.raises(DataError, match="no weights file"):
        load_model(f"timm:{name}@{tmp_path / 'none.safetensors'}")
    with pytest.raises(FormatError, match="not a weights file"):
        load_model(f"timm:{name}@{Path(__file__)}")
    with pytest.raises(FormatError, match="do not fit"):
        load_model(f"timm:deit_tiny_distilled_patch16_224@{file}")
    with pytest.raises(UnsupportedModelError, match="Did you mean vit_tiny_patch16_224"):
        load_model("timm:vit_tny_patch16_224")


def test_an_ensemble_of_timm_remembers_its_images(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from hydra_ensembles.cli.models import Loaded
    from hydra_ensembles.cli.output import save
    from hydra_ensembles.data import image_transform

    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=3
    ).eval()
    ensemble = hydra.fuse(model, [hydra.HeadMask.random(model, keep=0.5, seed=s) for s in (0, 1)])
    transform = image_transform(model)
    save(ensemble, tmp_path, Loaded(model, "timm", transform=transform, key=None))
    assert load_model(str(tmp_path)).transform == transform
    ensemble.transform = None
    ensemble.save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).transform.size in (32, (32, 32))  # its host's


def test_imagenet_folders_by_name_or_number(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_model(f"timm:vit_tiny_patch16_224@{tmp_path / 'weights.safetensors'}")
    for name, place in (("n01443537", 1), ("goldfish", 1), ("Great_White_Shark", 2)):
        write_picture(tmp_path / name / name / "0.png", torch.zeros(1, 8, 8))
        data = load_set(loaded, str(tmp_path / name))
        assert data.labels.tolist() == [place] and len(data.class_names) == 1000
    write_picture(tmp_path / "goldfish" / "unicorn" / "0.png", torch.zeros(1, 8, 8))
    with pytest.raises(DataError, match="'unicorn'"):
        load_set(loaded, str(tmp_path / "goldfish"))


def test_folders_never_become_other_classes(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_picture(tmp_path / name / "0.png", torch.zeros(1, 8, 8))

    def labels(names: list[str] | None, classes: int) -> list[int]:
        model = torch.nn.Module()
        model.num_classes = classes  # type: ignore[assignment]
        loaded = Loaded(model, "model", transform=ImageTransform(8), class_names=names)
        return load_set(loaded, str(tmp_path)).labels.tolist()

    with pytest.raises(DataError, match="without an image transform"):
        load_set(Loaded(torch.nn.Module(), "model"), str(tmp_path))
    assert labels(None, 2) == [0, 1]
    with pytest.raises(DataError, match=r"2 class names .* model has 10 classes"):
        labels(None, 10)
    assert labels(["bird", "Dog", "cat"], 3) == [2, 1]
    with pytest.raises(DataError, match=r"'cat' .* fits several"):
        labels(["cat", "dog", "cat"], 3)  # ImageNet has two cranes and two maillots
    assert labels(["cat", "dog", "Cat"], 3) == [0, 1]


def test_a_label_that_the_model_does_not_know() -> None:
    check_labels(torch.tensor([0, 1]), 2, source="data.csv", model="model")
    with pytest.raises(DataError, match="the label 7, but model has 2 classes"):
        check_labels(torch.tensor([0, 7]), 2, source="data.csv", model="model")


def test_digits_of_a_missing_class_keep_their_number(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shelf / "digits", tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "3")
    data = load_set(load_model(str(shelf / "host")), str(tmp_path / "some"))
    assert set(data.labels.tolist()) == {0, 1, 2, 4, 5, 6, 7, 8, 9}


def test_a_text_column_of_the_labelled_data_alone(tmp_path: Path) -> None:
    def tokenizer(texts: list[str], **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[len(text)] for text in texts])}

    (tmp_path / "known.csv").write_text("said,label\nyes,1\nno,0\n")
    (tmp_path / "other.txt").write_text("a question\nanother one\n")
    loaded = Loaded(torch.nn.Identity(), "model", tokenizer=tokenizer)
    known = load_set(loaded, str(tmp_path / "known.csv"), text_column="said")
    others = load_sets(loaded, [str(tmp_path / "other.txt")], text_column="said")
    assert known.labels.tolist() == [1, 0] and others["other"].texts == [
        "a question",
        "another one",
    ]
    with pytest.raises(DataError, match="no column 'sad'"):
        load_set(loaded, str(tmp_path / "known.csv"), text_column="sad")


def test_columns_are_named_as_the_command_line_has_them(tmp_path: Path) -> None:
    table = tmp_path / "no-header.tsv"
    table.write_text("0\ta dull film\n1\ta lovely film\n")
    with pytest.raises(DataError, match="first line must name the columns") as told:
        load_set(Loaded(None, "host", tokenizer=len), str(table))
    assert "with --label-column" in one_line(told.value)


def test_a_column_that_was_asked_for_is_no_missing_label(tmp_path: Path) -> None:
    table = tmp_path / "reviews.tsv"
    table.write_text("label\tcontent\n0\ta dull film\n1\ta lovely film\n")
    loaded = Loaded(None, "host", tokenizer=len)
    with pytest.raises(DataError, match="no column 'sentence'"):
        _load(Reading(text_column="sentence"), loaded, str(table))
    table.write_text("content\na dull film\na lovely film\n")
    files, note = _load(Reading(text_column="content"), loaded, str(table))
    assert files.count == 2 and files.labels is None and note.startswith("Labels are not used")


def test_texts_for_images_and_images_for_texts(shelf: Path, tmp_path: Path) -> None:
    table = tmp_path / "texts=1.csv"
    table.write_text("text,label\nyes,1\n")
    check_sources(str(table), [f"far={shelf / 'noise'}", "some/dataset", "glue:sst2"])
    for sources in ((str(tmp_path / "none.csv"),), (str(table), ["far=../none/at/all"])):
        with pytest.raises(DataError, match="does not exist"):
            check_sources(*sources)
    with pytest.raises(DataError, match="reads images"):
        load_set(load_model(str(shelf / "host")), str(table))
    with pytest.raises(DataError, match="has no tokenizer"):
        load_set(Loaded(torch.nn.Identity(), "model"), str(table))
    with pytest.raises(DataError, match="reads texts"):
        load_set(Loaded(torch.nn.Identity(), "model", tokenizer=len), str(shelf / "digits"))


ELSEWHERE = """
import json, sys
from hydra_ensembles.cli.models import load_model
for folder in sys.argv[1:]:
    loaded = load_model(folder)
    print(json.dumps([loaded.tokenizer is None, getattr(loaded.transform, "std", None)]))
"""


def test_an_ensemble_reads_and_fetches_nothing_elsewhere(tmp_path: Path) -> None:
    """Its config says where its host came from: another folder, or a name on the hub."""
    transformers = pytest.importorskip("transformers")
    other = tmp_path / "other"
    other.mkdir()
    words(other).save_pretrained(other)
    transformers.ViTImageProcessor(image_std=[0.1, 0.2, 0.3]).save_pretrained(other)
    folders = []
    for kind in ("bert", "vit"):
        for place in (str(other), "somebody/model"):
            folders.append(tmp_path / f"{kind}{len(folders)}")
            hydra.fuse(zoo.host(kind), EARLY).save_pretrained(folders[-1])
            rewrite(
                folders[-1],
                lambda config, p=place: config["host"]["config"].update({"_name_or_path": p}),
            )
    with serving() as (address, hub):
        lines = run(ELSEWHERE, *folders, address=address, home=tmp_path / "home")
    assert [json.loads(line) for line in lines] == [[True, None]] * 4
    assert hub.asked == []
