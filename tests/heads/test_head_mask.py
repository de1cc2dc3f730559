"""Head tables: ragged, set algebra, ranking with ties, JSON, printing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydra_ensembles import HeadMask, HeadScores
from hydra_ensembles.errors import MaskError, UnknownNameError
from hydra_ensembles.heads.head_mask import keep_count

rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[HeadMask, HeadMask]:
    first = draw(rows)
    second = [draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in first]
    return HeadMask(first), HeadMask(second)


@given(pairs())
def test_set_algebra(masks: tuple[HeadMask, HeadMask]) -> None:
    a, b = masks
    assert ~(a & b) == ~a | ~b
    assert (a - b) | (a & b) == a
    assert (a ^ b) == (a | b) - (a & b)
    assert (a & b) <= a <= (a | b)
    assert a.overlap(b) == b.overlap(a)
    assert a.overlap(a) == 1.0
    assert ~HeadMask.full(a) <= a <= HeadMask.full(a)
    assert all(a[layer][head] for layer, head in a.pairs()) and len(a.pairs()) == a.total_kept


@given(rows)
def test_json_round_trip(table: list[list[bool]]) -> None:
    mask = HeadMask(table)
    assert HeadMask.from_json(mask.to_json()) == mask
    assert hash(HeadMask.from_json(mask.to_json())) == hash(mask)


def test_json_files_and_errors(tmp_path: Path) -> None:
    scores = HeadScores([[0.5, 1.5], [2.0]], name="his", standard_error=[[0.1, 0.2], [0.3]])
    scores.to_json(tmp_path / "scores.json")
    loaded = HeadScores.from_json(tmp_path / "scores.json")
    assert loaded == scores
    assert loaded.name == "his"
    assert loaded.standard_error == HeadScores([[0.1, 0.2], [0.3]])
    with pytest.raises(MaskError, match="HeadScores"):
        HeadMask.from_json(tmp_path / "scores.json")
    with pytest.raises(MaskError, match="No file"):
        HeadMask.from_json(tmp_path / "nothing.json")
    with pytest.raises(MaskError, match="not the JSON"):
        HeadMask.from_json("{broken")


def test_ties_go_to_the_lower_index() -> None:
    scores = HeadScores([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
    assert scores.top_k(2) == HeadMask([[1, 1, 0], [1, 1, 0]])
    assert scores.top_k(2, scope="model") == HeadMask([[1, 0, 0], [0, 1, 0]])
    assert scores.ranking()[:3] == [(1, 1), (0, 0), (0, 1)]


def test_keep_is_a_fraction_a_number_or_a_list() -> None:
    scores = HeadScores([[3.0, 1.0, 2.0], [1.0, 5.0]])
    assert scores.top_k(0.5).kept == (2, 1)
    assert scores.top_k(0.0).kept == (1, 1), "a fraction keeps at least one"
    assert scores.top_k([0, 2]).kept == (0, 2)
    assert scores.top_k([3, 0.5]).kept == (3, 1)
    assert keep_count(0.5, 3) == 2
    for wrong in (1.5, -1, 4, True, "half"):
        with pytest.raises(MaskError):
            keep_count(wrong, 3)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="per layer"):
        scores.top_k([1])
    with pytest.raises(UnknownNameError, match="scope"):
        scores.top_k(1, scope="all")
    with pytest.raises(MaskError, match="not a list"):
        scores.top_k([1, 1], scope="model")


def test_scores_arithmetic_and_normalisation() -> None:
    scores = HeadScores([[1.0, 3.0], [2.0]])
    assert scores.minmax() == HeadScores([[0.0, 1.0], [0.5]])
    assert HeadScores([[2.0, 2.0]]).minmax() == HeadScores([[0.0, 0.0]])
    assert 0.5 * scores + (1 - scores) == HeadScores([[0.5, -0.5], [0.0]])
    assert -scores == scores * -1
    torch.testing.assert_close(scores.normalized()[1], torch.ones(1, dtype=torch.float64))
    assert HeadScores([[0.0, 0.0]]).normalized() == HeadScores([[0.0, 0.0]])


def test_bad_tables_are_refused() -> None:
    with pytest.raises(MaskError, match="0/1"):
        HeadMask([[0.5, 1.0]])
    with pytest.raises(MaskError, match="not finite"):
        HeadScores([[float("nan")]])
    with pytest.raises(MaskError, match="at least one"):
        HeadMask([])
    with pytest.raises(MaskError, match="shape"):
        HeadMask(torch.ones(2, 2, 2))
    with pytest.raises(MaskError, match="different shapes"):
        HeadMask([[1, 0]]) | HeadMask([[1, 0, 1]])
    with pytest.raises(MaskError, match="do not fit"):
        HeadScores([[1.0]], standard_error=[[1.0, 2.0]])


def test_printing() -> None:
    text = str(HeadMask([[1, 0, 1], [0, 1]]))
    assert text.splitlines() == [
        "HeadMask: 3 of 5 heads kept",
        "  0  ■ · ■  2/3",
        "  1  · ■    1/2",
    ]
    assert eval(repr(HeadMask([[1, 0]]))) == HeadMask([[1, 0]])
    assert "higher = keep" in str(HeadScores([[1.0]], name="his"))


def test_random_masks_are_seeded() -> None:
    assert HeadMask.random([4, 4], keep=2, seed=1) == HeadMask.random([4, 4], keep=2, seed=1)
    assert len({HeadMask.random([8, 8], keep=4, seed=s) for s in range(8)}) > 4
