"""NegLabel: words beside the class names of a zero-shot classifier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts import ZeroShotClassifier
from hydra_ensembles.hosts.negative_labels import common_nouns, least_similar
from hydra_ensembles.uncertainty import neglabel
from tests import zoo

WORDS = [f"{first} {second}" for first in ("cat", "dog", "old", "the") for second in "abcdefgh"]


def classifier(negatives: bool | list[str] = True) -> ZeroShotClassifier:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        vision_config={**zoo.SIZES, **zoo.IMAGE},
        text_config={**zoo.SIZES, **zoo.TEXT},
        projection_dim=16,
    )
    clip = zoo.seeded(lambda: CLIPModel(config)).eval()
    templates, tokenizer = ["a photo of a {}."], zoo.WordTokenizer()
    return ZeroShotClassifier(clip, zoo.NAMES, templates, tokenizer, negatives=negatives).eval()


def images(count: int = 6, seed: int = 0) -> torch.Tensor:
    return zoo.batch("zero-shot-clip", size=count, seed=seed)


def formula(model: ZeroShotClassifier, pixels: torch.Tensor) -> np.ndarray:
    """Return S(x) as the paper writes it, word by word and group by group."""
    with torch.no_grad():
        found = F.normalize(model.image_tower(pixels), dim=-1).double().numpy()
    names = model.text_embeddings.double().numpy()
    groups = model.negative_embeddings.double().numpy()
    scale = float(model.logit_scale)
    shares = []
    for image in found:
        inside = sum(np.exp(scale * image @ name) for name in names)
        parts = []
        for group in groups:
            outside = sum(np.exp(scale * image @ word) for word in group)
            parts.append(inside / (inside + outside))
        shares.append(np.mean(parts))
    return np.array(shares)


@pytest.mark.parametrize("negatives", [True, WORDS])
def test_the_score_is_the_formula(negatives: bool | list[str]) -> None:
    model, plain = classifier(negatives), classifier(False)
    assert model.negative_embeddings.shape[0] == (9 if negatives is True else 1)
    pixels = images()
    with torch.no_grad():
        logits, usual = model(pixels).logits, plain(pixels).logits
    torch.testing.assert_close(logits.softmax(-1), usual.softmax(-1))
    expected = 1 - torch.from_numpy(formula(model, pixels))
    torch.testing.assert_close(neglabel(logits).double(), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(DataError, match="negatives=True"):
        neglabel(usual)


def test_the_least_similar_words_are_kept() -> None:
    classes = torch.eye(4)[:2]
    words = F.normalize(torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]))
    assert sorted(least_similar(words, classes).tolist()) == [1, 3]
    nouns = common_nouns()
    assert len(nouns) == len(set(nouns)) == 1838
    with pytest.raises(ValueError, match="no word that is not a class name"):
        classifier([name.upper() for name in zoo.NAMES])


def test_an_ensemble_scores_saves_and_exports_it(tmp_path: Path) -> None:
    host = classifier()
    full = hydra.HeadMask.full(host)
    masks = [full.with_layer(len(full) - 1, [m, 1, 1 - m, 1]) for m in (True, False)]
    ensemble = hydra.fuse(host, masks).eval()
    batch = {"pixel_values": images()}
    hydra.verify(ensemble, batch)
    ensemble.score, ensemble.temperature, ensemble.member_temperatures = "neglabel", 2.0, [1.5, 3.0]
    answer = ensemble.predict(batch)
    shares = [formula(ensemble.member(number), batch["pixel_values"]) for number in (0, 1)]
    expected = 1 - torch.from_numpy(np.mean(shares, 0))
    torch.testing.assert_close(answer.uncertainty.double(), expected, atol=1e-5, rtol=1e-4)

    ensemble.save_pretrained(tmp_path / "saved")
    twin = hydra.HydraEnsemble.from_pretrained(tmp_path / "saved")
    assert torch.equal(twin.predict(batch).uncertainty, answer.uncertainty)

    data = [{"pixel_values": images(seed=s), "labels": torch.arange(6) % 5} for s in range(3)]
    scored = hydra.evaluate(
        ensemble, data, ood=[{"pixel_values": 5 * images(seed=9)}], score="neglabel", progress=False
    )
    inside, outside = (
        torch.cat([ensemble.predict({"pixel_values": pixels}).uncertainty for pixels in some])
        for some in ([one["pixel_values"] for one in data], [5 * images(seed=9)])
    )
    auroc = (outside[:, None] > inside).double().mean()
    assert scored["ood/ood/AUROC"] == pytest.approx(float(auroc), abs=1e-6)

    ensemble.export(tmp_path / "exported")
    exported = runtime.load(tmp_path / "exported")
    outputs = exported.run({"pixel_values": batch["pixel_values"].numpy()})
    np.testing.assert_allclose(outputs["uncertainty"], answer.uncertainty, atol=1e-4)
