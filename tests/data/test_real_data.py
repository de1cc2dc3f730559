"""The real data of the experiments: run by hand with HYDRA_DATA set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hydra_ensembles.errors import DataError
from tests.loose_files import load

real_data = load("experiments/real_data.py")
needs_data = pytest.mark.skipif("HYDRA_DATA" not in os.environ, reason="HYDRA_DATA is not set")


def test_missing_data_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_DATA", raising=False)
    with pytest.raises(DataError, match="HYDRA_DATA"):
        real_data.data_root()
    with pytest.raises(DataError, match="does not exist"):
        real_data.data_root(tmp_path / "no")
    for read in (real_data.mnist, real_data.ag_news, real_data.multi30k, real_data.tinyimagenet):
        with pytest.raises(DataError, match=str(tmp_path)):
            read(tmp_path)
    with pytest.raises(DataError, match="calibration, validation, test"):
        real_data.imagenet(tmp_path, "train")


def test_sets_make_batches() -> None:
    pixels = torch.randint(0, 256, (6, 1, 10, 10), dtype=torch.uint8)
    images = real_data.ImageSet(pixels, torch.arange(6))
    batch = next(iter(images.batches(size=16, batch_size=4)))
    assert batch[0].shape == (4, 3, 16, 16)
    assert batch[1].tolist() == [0, 1, 2, 3]
    outliers = images.unlabelled().subset([5, 0]).batches(key="pixel_values")
    assert set(next(iter(outliers))) == {"pixel_values"}
    texts = real_data.TextSet(["a", "b", "c"], [0, 1, 0])
    assert len(texts.sample(2, seed=1)) == 2
    assert texts.unlabelled().labels is None


@pytest.mark.real
@needs_data
def test_everything_is_there(tmp_path: Path) -> None:
    root = real_data.data_root()
    parts = [real_data.imagenet(root, part, cache=tmp_path) for part in real_data.IMAGENET_PARTS]
    assert all(torch.equal(part.labels, torch.arange(1000)) for part in parts)
    again = real_data.imagenet(root, "test", cache=tmp_path)  # from the cache
    assert torch.equal(again.pixels, parts[2].pixels)
    assert len(real_data.imagenet_class_names(root)) == 1000
    assert len(real_data.textures(root, "validation")) == len(real_data.textures(root)) == 240
    assert len(real_data.tinyimagenet(root)) == 2625
    assert real_data.cifar10(root).labels.bincount().tolist() == [1000] * 10
    assert len(real_data.mnist(root)) == 10_000
    assert {name: len(s) for name, s in real_data.text_outliers(root).items()} == {
        "trec": 500,
        "ag_news": 7600,
        "multi30k": 3532,
    }
    assert len(real_data.trec(root, "train")) == 5452
    assert len(real_data.movie_reviews(root)) == 2000
    assert len(real_data.sst2(root)) == 872
    assert len(real_data.sst2(root, "phrases")) == 67_349
    held = [set(real_data.sst2(root, part).texts) for part in ("calibration", "validation")]
    assert not held[0] & held[1]
