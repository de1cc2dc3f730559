"""Probabilities as scikit-learn gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as hydra
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import DataError, UnsupportedModelError
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import picture, words


def test_every_form_of_data_gives_the_same_table(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    ensemble.temperature = 1.7
    images, labels = zoo.batch("vit", size=10), torch.arange(10) % 5
    expected = ensemble.predict(images).probabilities.numpy()
    forms = {
        "a tensor": images,
        "an array": images.double().numpy(),
        "inputs and labels": (images, labels),
        "a mapping": {"pixel_values": images},
        "a list of batches": [images[:7], images[7:]],
        "a loader": DataLoader(TensorDataset(images, labels), batch_size=4),
        "a data set": TensorDataset(images, labels),
    }
    for name, data in forms.items():
        table = ensemble.predict_proba(data, batch_size=3)
        assert isinstance(table, np.ndarray) and table.shape == (10, 5), name
        np.testing.assert_allclose(table, expected, atol=1e-6, err_msg=name)
    loss = -np.log(expected[np.arange(10), labels.numpy()]).mean()
    assert log_loss(labels.numpy(), ensemble.predict_proba(images)) == pytest.approx(loss, abs=1e-5)
    ensemble.transform = ImageTransform(size=16, crop=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    pictures = [picture(seed) for seed in range(5)]
    np.testing.assert_allclose(
        ensemble.predict_proba(pictures, batch_size=2),
        ensemble.predict(pictures).probabilities.numpy(),
        atol=1e-6,
    )


def test_texts_and_what_is_no_table(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForTokenClassification

    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(tmp_path)
    table = ensemble.predict_proba(["a good film", "bad", "a bad film"], batch_size=2)
    np.testing.assert_allclose(table.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(
        table[2:], ensemble.predict("a bad film").probabilities.numpy(), atol=1e-6
    )
    with pytest.raises(DataError, match="empty"):
        ensemble.predict_proba([])
    config = BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5)
    tagger = hydra.fuse(BertForTokenClassification(config).eval(), EARLY)
    with pytest.raises(UnsupportedModelError, match="every token"):
        tagger.predict_proba(zoo.batch("bert"))
