"""The service says what a folded ensemble says: class and confidence are its student's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.data import digits
from hydra_ensembles.data.transforms import ImageTransform
from hydra_ensembles.hosts.tiny_vit import TinyViT
from tests.refit.test_folding import perturbed
from tests.serving.conftest import DIGITS, client_of, png
from tests.serving.test_answers import PICTURES, same


@pytest.mark.parametrize("readout", ["states", "logits"])
def test_the_service_says_what_the_folded_ensemble_says(readout: Any) -> None:
    start, known = TinyViT(DIGITS, seed=1), digits(16, seed=0).test.subset(range(200))
    with torch.no_grad():
        for parameter in start.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    hosts = [perturbed(start.eval(), seed, size=0.3) for seed in range(3)]
    options = {"readout": readout, "student": True, "max_cost": 2.0, "progress": False}
    ensemble = hydra.fold(hosts, known, **options)
    ensemble.id2label = [f"digit {number}" for number in range(10)]
    ensemble.transform = ImageTransform(
        size=DIGITS.image_size, crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    ensemble.temperature = 1.7
    ensemble.fit_novelty_(known, progress=False)
    answer = ensemble.predict(PICTURES)
    assert answer.student_logits is not None
    members = answer.member_logits.softmax(-1).mean(1).amax(-1)
    assert float((answer.confidence - members).abs().max()) > 1e-3  # not the members' mean
    files = [("file", (f"{i}.png", png(p), "image/png")) for i, p in enumerate(PICTURES)]
    with client_of(ensemble) as client:
        got = client.post("/predict", files=files)
    assert got.status_code == 200, got.text
    same(got.json()["answers"], ensemble, PICTURES)
