"""What cannot work is refused by its right name, before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import BertConfig, ViTConfig

import hydra_ensembles as hydra
from hydra_ensembles.cli.models import load_model
from hydra_ensembles.errors import FormatError, HydraError, UnsupportedModelError
from tests import zoo


@pytest.mark.parametrize(
    ("built", "task"),
    [
        ("TapasForQuestionAnswering", "tables"),
        ("T5ForConditionalGeneration", "generation"),
    ],
)
def test_text_models(built: str, task: str, tmp_path: Path) -> None:
    BertConfig(architectures=[built]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=task):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("built", "settings"),
    [
        ("BertForTokenClassification", {}),
        ("BertForSequenceClassification", {"num_labels": 1}),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}),
    ],
)
def test_text_models_of_other_tasks_are_loaded(
    built: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model = getattr(transformers, built)(BertConfig(**zoo.SIZES, **zoo.TEXT, **settings))
    model.save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path)).model) is type(model)


def test_an_image_model(tmp_path: Path) -> None:
    ViTConfig(architectures=["ViTForSemanticSegmentation"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="segmentation"):
        load_model(str(tmp_path))


def test_pickled_objects_in_a_transformers_folder(tmp_path: Path) -> None:
    BertConfig(architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="state_dict"):
        load_model(str(tmp_path))


def test_push_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    model = zoo._vit()
    ensemble = hydra.fuse(model, [hydra.HeadMask.full(model)] * 2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HydraError, match="Check the name"):
        ensemble.push_to_hub("somebody/model", token="hf_none")
