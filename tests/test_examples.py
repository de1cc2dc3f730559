"""The tutorials run, on less training than when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loose_files import load

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "epochs", "better_than"), [("vit", 12, 0.7), ("bert", 4, 0.7), ("clip", 12, 0.7)]
)
def test_tutorials(name: str, epochs: int, better_than: float, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = load(f"examples/{name}.py").main(epochs=epochs, folder=tmp_path)
    assert results["hydra"]["cls/Acc"] > better_than
    assert (tmp_path / f"{name}-hydra" / "config.json").is_file()


def test_the_whole_idea_is_short_and_works() -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) < 150
    # it compares fused members with one by one itself
    figures = load("examples/minimal.py").main(epochs=6)
    assert figures["hydra accuracy"] > 0.7
