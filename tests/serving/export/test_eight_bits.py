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
from tests import zoo

from .conftest import image_ensemble, images, known_images, late_masks


def scales(count: int, seed: int) -> torch.Tensor:
    """Return pictures that differ in two quiet ways only: all else is the same."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return base * (1 + 0.02 * torch.randn(count, 1, 1, 1, generator=generator)) + (
        0.02 * torch.randn(count, 1, 1, 1, generator=generator)
    )


def run(folder: Path, pixels: torch.Tensor, program: str) -> dict[str, np.ndarray]:
    return runtime.load(folder, program=program, threads=1).run({"pixel_values": pixels.numpy()})


def test_new_known_data_raises_the_promised_alarms(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"))).eval()
    known = [{"pixel_values": scales(16, seed)} for seed in range(20)]
    ensemble.fit_novelty_(known, progress=False)
    example = {"pixel_values": scales(17, 50)}
    ensemble.export(tmp_path, formats=["onnx"], example=example, int8=True, known=known, alarm=0.1)
    fresh = [scales(16, seed) for seed in range(100, 120)]
    novelty = np.concatenate([run(tmp_path, part, "int8")["novelty"] for part in fresh])
    new = np.concatenate([run(tmp_path, part, "int8")["abstain"] for part in fresh])
    assert abs(novelty.mean() - 0.5) < 0.1
    assert 0.03 < new.mean() < 0.2  # 0.1 is promised
    outliers = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    assert run(tmp_path, outliers, "int8")["novelty"].min() > 0.9


def test_its_rule_is_its_own_and_in_the_contract(exported: Any) -> None:
    _, folder = exported
    contract = runtime.read_contract(folder)
    full, small = contract.rule("onnx"), contract.rule("int8")
    assert full == contract.data["rule"] and small["kind"] == "policy"
    assert (small["risk"], small["alarm"]) == (full["risk"], full["alarm"])
    assert small["novelty_score_above"] != full["novelty_score_above"]
    outputs = run(folder, images(17, 300)["pixel_values"], "int8")
    new = outputs["novelty_score"] > np.float32(small["novelty_score_above"])
    unsure = outputs["uncertainty"] > np.float32(small["uncertainty_above"])
    assert (outputs["decision"] == np.where(new, 2, unsure)).all()
    backend = ExportedBackend(runtime.load(folder, program="int8"))
    assert backend.rule == small["words"] != ExportedBackend(runtime.load(folder)).rule


def test_without_known_data_it_is_refused(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    with pytest.raises(DataError, match=r"8-bit weights move the features.*--known DATA"):
        ensemble.export(tmp_path, int8=True)
    with pytest.raises(ValueError, match="pass int8=True"):
        ensemble.export(tmp_path, known=known_images())
    with pytest.raises(DataError, match="known data is empty"):
        ensemble.export(tmp_path, formats=["onnx"], int8=True, known=[])
    with pytest.raises(DataError, match="has the inputs pixels; the example has pixel_values"):
        ensemble.export(tmp_path, formats=["onnx"], int8=True, known=[{"pixels": torch.zeros(1)}])
    ensemble.policy = None
    with pytest.raises(ValueError, match="fit_policy"):
        ensemble.export(tmp_path, int8=True, known=known_images(), held_out=known_images())
    assert not list(tmp_path.iterdir())


def test_a_policy_that_is_not_fitted_anew_says_so(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    with pytest.warns(UserWarning, match="promise .* is not made for it"):
        ensemble.export(tmp_path, formats=["onnx"], int8=True, known=known_images())
    rule = runtime.read_contract(tmp_path).rule("int8")
    assert ensemble.policy is not None
    assert rule["uncertainty_above"] == pytest.approx(ensemble.policy.threshold)
    assert "as with the full weights" in rule["words"]


def test_without_novelty_it_needs_no_data(tmp_path: Path) -> None:
    ensemble = image_ensemble()
    ensemble.policy = ensemble.novelty = None
    ensemble.export(tmp_path, formats=["onnx"], int8=True)
    assert "novelty" not in run(tmp_path, images(2, 0)["pixel_values"], "int8")
