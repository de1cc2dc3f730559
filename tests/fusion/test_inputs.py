"""What was fitted is kept: class names, the transform and the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.data.transforms import ProcessorTransform
from hydra_ensembles.errors import DataError
from hydra_ensembles.fusion.inputs import token_limit
from tests import zoo
from tests.fusion.test_fusion import EARLY

pytestmark = pytest.mark.filterwarnings("ignore:Model config")
TRANSFORM = ImageTransform(size=16, crop=0.875, mean=(0.1, 1 / 3, 0.7), std=(0.3, 0.2, 1 / 7))


def picture(seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (20, 24, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def words(tmp_path: Path) -> Any:
    """A real word-piece tokenizer with a vocabulary of its own."""
    from transformers import BertTokenizer

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    return BertTokenizer(str(tmp_path / "vocab.txt"))


def test_pictures_and_paths_by_the_saved_transform(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    with pytest.raises(DataError, match=r"ensemble\.transform"):
        ensemble.predict(picture())
    ensemble.transform = TRANSFORM
    ensemble.save_pretrained(tmp_path / "saved")
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved")
    assert loaded.transform == TRANSFORM  # to the last digit
    pictures = [picture(seed) for seed in range(3)]
    expected = loaded.predict(torch.stack([TRANSFORM(p) for p in pictures])).probabilities
    assert torch.equal(loaded.predict(pictures).probabilities, expected)
    assert torch.equal(loaded.predict(tuple(pictures)).probabilities, expected)
    torch.testing.assert_close(loaded.predict(pictures[1]).probabilities, expected[1:2])
    pictures[0].save(tmp_path / "0.png")
    for path in (tmp_path / "0.png", str(tmp_path / "0.png"), [tmp_path / "0.png"]):
        torch.testing.assert_close(loaded.predict(path).probabilities, expected[:1])
    with pytest.raises(DataError, match="Cannot read the image"):
        loaded.predict(tmp_path / "1.png")


def test_a_processor_is_saved_along(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    ensemble.save_pretrained(tmp_path, image_processor=processor)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert isinstance(loaded.transform, ProcessorTransform)
    assert torch.equal(
        loaded.predict(picture()).probabilities, ensemble.predict(picture()).probabilities
    )
    loaded.save_pretrained(tmp_path)  # over itself
    assert HydraEnsemble.from_pretrained(tmp_path).transform is not None


def test_texts_by_the_saved_tokenizer(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = tokenizer
    ensemble.save_pretrained(tmp_path / "saved")
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved")
    texts = ["a good film", "bad films"]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    expected = ensemble.predict(batch).probabilities
    torch.testing.assert_close(loaded.predict(texts).probabilities, expected)
    torch.testing.assert_close(loaded.predict(texts[0]).probabilities, expected[:1])
    assert len(loaded.predict("good " * 10_000)) == 1  # cut to what the host reads
    with pytest.raises(DataError, match="a text was expected"):
        loaded.predict([picture()])


def test_a_host_with_padded_positions_reads_fewer_tokens() -> None:
    config = zoo.host("roberta").config
    assert token_limit(config, None) == config.max_position_embeddings - config.pad_token_id - 1
    assert token_limit(None, None) is None


def test_class_names_are_kept(tmp_path: Path) -> None:
    for name in ("vit", "timm"):
        ensemble = hydra.fuse(zoo.host(name), EARLY)
        ensemble.id2label = ["cat", "dog", "bird", "fish", "horse"]
        ensemble.save_pretrained(tmp_path / name)
        loaded = HydraEnsemble.from_pretrained(tmp_path / name)
        assert loaded.id2label == {0: "cat", 1: "dog", 2: "bird", 3: "fish", 4: "horse"}
        if name == "vit":
            assert loaded.config.id2label[4] == "horse" and loaded.config.label2id["dog"] == 1
        with pytest.raises(ValueError, match="every class from 0"):
            ensemble.id2label = {1: "cat"}


def test_build_keeps_what_its_data_knows(tmp_path: Path) -> None:
    from hydra_ensembles.data.image_data import image_folder

    for label in range(5):
        for number in range(8):
            path = tmp_path / f"kind {label}" / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            picture(label * 8 + number).save(path)
    data = image_folder(tmp_path, TRANSFORM)
    ensemble = hydra.build(
        zoo.host("vit"), data, method="random", members=2, max_cost=None, progress=False
    )
    assert ensemble.transform == TRANSFORM
    assert ensemble.id2label == {n: f"kind {n}" for n in range(5)}
