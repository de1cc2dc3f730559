"""An 8-bit program decides by its own features, or it is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles.errors import DataError
from hydra_ensembles.serving.backends import ExportedBackend
from hydra_ensembles.uncertainty import NoveltyFit, Policy
from tests import zoo

from .conftest import image_ensemble, images, known_images, late_masks


def scales(count: int, seed: int) -> torch.Tensor:
    """Return images that differ in two quiet ways only: all else is the same."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return base * (1 + 0.02 * torch.randn(count, 1, 1, 1, generator=generator)) + (
        0.02 * torch.randn(count, 1, 1, 1, generator=generator)
    )


def run(folder: Path, pixels: torch.Tensor, program: str) -> dict[str, np.ndarray]:
    return runtime.load(folder, program=program, threads=1).run({"pixel_values": pixels.numpy()})


def test_new_known_data_raises_the_guaranteed_alarms(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"))).eval()
    known = [{"pixel_values": scales(16, seed)} for seed in range(20)]
    ensemble.fit_novelty_(known, progress=False)
    example = {"pixel_values": scales(17, 50)}
    ensemble.export(tmp_path, example=example, int8=True, known=known, alarm=0.1)
    fresh = [scales(16, seed) for seed in range(100, 120)]
    novelty = np.concatenate([run(tmp_path, part, "int8")["novelty"] for part in fresh])
    new = np.concatenate([run(tmp_path, part, "int8")["decision"] for part in fresh]) > 0
    assert abs(novelty.mean() - 0.5) < 0.1
    assert 0.03 < new.mean() < 0.2  # 0.1 is guaranteed
    outliers = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    assert run(tmp_path, outliers, "int8")["novelty"].min() > 0.9


def test_its_terms_are_checked_on_its_own_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.any_longer_sum(monkeypatch)
    ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"))).eval()
    known = [{"pixel_values": scales(16, seed)} for seed in range(6)]
    ensemble.fit_novelty_(known, progress=False)
    assert ensemble.novelty is not None and "checked on far" in ensemble.novelty.choice
    chosen = []
    finish = NoveltyFit.finish

    def said(*args: Any, **options: Any) -> Any:
        novelty = finish(*args, **options)
        chosen.append(novelty.choice)
        return novelty

    monkeypatch.setattr(NoveltyFit, "finish", said)
    ensemble.export(tmp_path, example={"pixel_values": scales(17, 50)}, int8=True, known=known)
    assert len(chosen) == 1 and "checked on far outliers" in chosen[0]


def test_its_policy_is_its_own_and_in_the_contract(exported: Any) -> None:
    _, folder = exported
    contract = runtime.read_contract(folder)
    full, small = contract.policy("onnx"), contract.policy("int8")
    assert (small["risk"], small["alarm"]) == (full["risk"], full["alarm"])
    assert small["novelty_score_above"] != full["novelty_score_above"]
    outputs = run(folder, images(17, 300)["pixel_values"], "int8")
    new = outputs["novelty_score"] > np.float32(small["novelty_score_above"])
    unsure = outputs["uncertainty"] > np.float32(small["uncertainty_above"])
    assert (outputs["decision"] == unsure + 2 * new).all()
    backend = ExportedBackend(runtime.load(folder, program="int8"))
    assert backend.rule == small["words"] != ExportedBackend(runtime.load(folder)).rule


def test_without_data_it_is_refused(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    known = known_images()
    with pytest.raises(DataError, match="--known"):
        ensemble.export(tmp_path, int8=True)
    with pytest.raises(DataError, match="--held-out"):
        ensemble.export(tmp_path, int8=True, known=known)
    with pytest.raises(ValueError, match="int8=True"):
        ensemble.export(tmp_path, known=known)
    ensemble.policy = None
    with pytest.raises(DataError, match="empty"):
        ensemble.export(tmp_path, int8=True, known=[])
    with pytest.raises(DataError, match="inputs pixels"):
        ensemble.export(tmp_path, int8=True, known=[{"pixels": torch.zeros(1)}])
    with pytest.raises(ValueError, match="fit_policy"):
        ensemble.export(tmp_path, int8=True, known=known, held_out=known)
    assert not list(tmp_path.iterdir())


def test_thresholds_set_by_hand_stay(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    ensemble.policy = Policy(threshold=0.7, novelty_threshold=3.0, alarm=0.2, score="entropy")
    ensemble.export(tmp_path, int8=True, known=known_images())
    contract = runtime.read_contract(tmp_path)
    full, small = contract.policy("onnx"), contract.policy("int8")
    assert full["uncertainty_above"] == small["uncertainty_above"] == 0.7
    novelty = run(tmp_path, images(64, 3)["pixel_values"], "int8")
    new = novelty["novelty_score"] > np.float32(small["novelty_score_above"])
    np.testing.assert_array_equal(new, novelty["novelty"] > 0.8)  # a rank among its own features


def test_without_novelty_it_needs_no_data(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    ensemble.policy = ensemble.novelty = None
    ensemble.export(tmp_path, int8=True)
    assert "novelty" not in run(tmp_path, images(2, 0)["pixel_values"], "int8")
