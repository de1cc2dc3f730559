"""The README is short, and its code runs as it is printed, on a small model and drawn pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
HUB_NAME = "google/vit-base-patch16-224"
CLASSES = 4


def batches(count: int, *, seed: int, labels: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return drawn pictures, whose class is their brightest corner."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count // 20):
        pixels = torch.randn(20, 3, 16, 16, generator=draw)
        corner = torch.randint(CLASSES, (20,), generator=draw)
        for picture, place in zip(pixels, corner.tolist(), strict=True):
            picture[:, 8 * (place // 2) :, 8 * (place % 2) :][:, :8, :8] += 1.5
        batch = {"pixel_values": pixels}
        found.append({**batch, "labels": corner} if labels else batch)
    return found


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 170


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_its_code_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import hydra_ensembles as hydra

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    untrained = transformers.ViTForImageClassification(config)
    trained = hydra.finetune(
        untrained, batches(200, seed=1), epochs=3, learning_rate=3e-3, progress=False
    )
    trained[0].model.save_pretrained(tmp_path)
    names: dict[str, Any] = {
        "calibration": batches(200, seed=2),
        "held_out": batches(100, seed=3),
        "data": batches(60, seed=1),
        "known": batches(100, seed=4, labels=False),
        "test": batches(60, seed=5),
        "textures": [{"pixel_values": torch.rand(20, 3, 16, 16)}],
        "batch": batches(20, seed=6)[0],
    }
    code = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(code) >= 4 and HUB_NAME in code[0]
    for block in code:
        exec(block.replace(HUB_NAME, str(tmp_path)), names)
    answer = names["answer"]
    for field in re.findall(r" \.(\w+)", code[0]):
        assert getattr(answer, field) is not None, field
    assert len(answer.class_index) == 20 and set(answer.novelty.shape) == {20}
    assert names["student"].members == 3 and names["results"]["ood/textures/novelty/AUROC"] >= 0
