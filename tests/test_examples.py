"""The tutorials run, on less training than when they are read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "epochs", "better_than"), [("vit", 12, 0.7), ("bert", 4, 0.7), ("clip", 12, 0.7)]
)
def test_tutorials(name: str, epochs: int, better_than: float, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = load(name).main(epochs=epochs, folder=tmp_path)
    assert results["hydra"]["cls/Acc"] > better_than
    assert (tmp_path / f"{name}-hydra" / "config.json").is_file()


def test_the_whole_idea_is_short_and_works() -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) < 150
    figures = load("minimal").main(epochs=6)  # it compares fused members with one by one itself
    assert figures["hydra accuracy"] > 0.7
