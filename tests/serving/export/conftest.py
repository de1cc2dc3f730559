"""Small ensembles with everything that is exported: temperatures, novelty, a policy, names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from tests import zoo

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "joy", "to", "watch", "no", "plot", "fine", "!"]


def late_masks(host: Any, *, blocks: int = 2, members: int = 3) -> list[hydra.HeadMask]:
    """Return masks of members that part in the last blocks, each with two heads of its own."""
    full = hydra.HeadMask.full(host)
    masks = []
    for member in range(members):
        mask = full
        for layer in range(len(full) - blocks, len(full)):
            row = torch.zeros(full.shape[layer], dtype=torch.bool)
            row[[(member + i) % len(row) for i in range(2)]] = True
            mask = mask.with_layer(layer, row)
        masks.append(mask)
    return masks


def tokenizer(side: str = "right") -> Any:
    """Return a real tokenizer of a few words, with BERT's special tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side=side,
        model_max_length=24,
    )


def images(size: int, seed: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": zoo.batch("vit", size=size, seed=seed)}


def image_ensemble() -> hydra.HydraEnsemble:
    """Return a calibrated ViT ensemble with novelty, a policy, names and a transform."""
    ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"))).eval()
    ensemble.temperature, ensemble.member_temperatures = 1.3, [1.0, 2.0, 0.7]
    ensemble.score = "entropy"
    ensemble.id2label = ["ant", "bee", "cat", "dog", "eel"]
    ensemble.transform = hydra.data.ImageTransform(
        size=16, crop=0.9, mean=(0.5,) * 3, std=(0.3,) * 3
    )
    ensemble.fit_novelty_(known_images(), progress=False)
    hydra.fit_policy(ensemble, held_out_images(ensemble), risk=0.15, alarm=0.2, progress=False)
    return ensemble


def known_images() -> list[dict[str, torch.Tensor]]:
    return [{**images(8, seed), "labels": torch.arange(8) % 5} for seed in range(12)]


def held_out_images(ensemble: hydra.HydraEnsemble) -> list[dict[str, torch.Tensor]]:
    """Return labelled images, a quarter of them called wrong: some answers are withheld."""
    held_out = images(32, 50)
    labels = ensemble.predict(held_out).class_index
    labels[::4] = (labels[::4] + 1) % 5
    return [{**held_out, "labels": labels}]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[hydra.HydraEnsemble, Path]:
    """Export the ViT ensemble once, also with 8-bit weights."""
    folder = tmp_path_factory.mktemp("export") / "vit"
    ensemble = image_ensemble()
    data = {"known": known_images(), "held_out": held_out_images(ensemble)}
    ensemble.export(folder, example=images(17, 99), int8=True, **data)
    return ensemble, folder


@pytest.fixture
def copied(exported: tuple[hydra.HydraEnsemble, Path], tmp_path: Path) -> Callable[[], Path]:
    """Return a function that copies the exported folder, to spoil it."""
    import shutil

    def copy() -> Path:
        return Path(shutil.copytree(exported[1], tmp_path / "copy"))

    return copy
