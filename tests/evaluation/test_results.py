"""Results: round trips, tables, intervals and paired comparisons."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.evaluation import Results, compare, compare_table, evaluate

from .test_evaluator import OOD, TEST, Ensemble, X, Y, batches

WEAK = Ensemble(1, seed=5)


@pytest.fixture(scope="module")
def strong():
    return evaluate(
        Ensemble(5), TEST, ood=OOD, score=["msp", "energy"], bootstrap=200, name="five | strong"
    )


@pytest.fixture(scope="module")
def weak():
    return evaluate(WEAK, TEST, ood=OOD, score=["msp", "energy"], bootstrap=200, name="weak_one")


def test_json_round_trip_is_exact(strong):
    again = Results.from_json(strong.to_json())
    assert again.figures == strong.figures
    assert again.intervals == strong.intervals
    assert again.settings == strong.settings
    assert again == strong
    assert not again.examples


def test_numbers_that_json_does_not_know(tmp_path):
    odd = Results("odd", {"cls/NLL": math.inf, "cls/Acc": 0.1 + 0.2})
    again = Results.from_json(odd.to_json())
    assert again["cls/NLL"] == math.inf
    assert again["cls/Acc"] == 0.1 + 0.2
    json.loads(odd.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_saved_and_loaded_with_examples(strong, weak, tmp_path):
    strong.save(tmp_path / "strong.json")
    weak.save(tmp_path / "weak.json", examples=False)
    again = Results.load(tmp_path / "strong.json")
    assert again == strong
    assert again.examples.keys() == strong.examples.keys()
    for name, columns in strong.examples.items():
        for column, values in columns.items():
            assert torch.equal(again.examples[name][column], values)
    assert not Results.load(tmp_path / "weak.json").examples
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "strong.json",
        "strong.safetensors",
        "weak.json",
    ]
    weak.save(tmp_path / "other.json")
    (tmp_path / "other.safetensors").rename(tmp_path / "strong.safetensors")
    with pytest.raises(FormatError, match="does not belong"):
        Results.load(tmp_path / "strong.json")
    (tmp_path / "strong.safetensors").unlink()
    assert Results.load(tmp_path / "strong.json").figures == strong.figures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "record of results"),
        ('{"format": "other"}', "record of results"),
        ('{"format": "hydra-ensembles/results", "version": 99}', "newer than 1"),
        ('{"format": "hydra-ensembles/results", "version": 1}', "damaged"),
        ('{"format": "hydra-ensembles/results", "name": "x", "figures": {"a": "b"}}', "damaged"),
    ],
)
def test_damaged_records_are_refused(text, message):
    with pytest.raises(FormatError, match=message):
        Results.from_json(text)


def test_markdown_side_by_side(strong, weak):
    lines = compare_table([strong, weak], keys=["cls/Acc", "cls/NLL", "div/MI"]).splitlines()
    assert len(lines) == 4
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    assert "cls/Acc ↑" in lines[0]
    assert "cls/NLL ↓" in lines[0]
    assert lines[2].startswith(r"| five \| strong")
    assert f"**{100 * strong['cls/Acc']:.2f}**" in lines[2]
    assert "**" not in lines[3]
    assert "[" in lines[2]
    turned = compare_table([strong, weak], keys=["cls/Acc", "cls/NLL"], rows="figures")
    assert [line.split("|")[1].strip() for line in turned.splitlines()[2:]] == [
        "cls/Acc ↑",
        "cls/NLL ↓",
    ]


def test_patterns_choose_figures(strong, weak):
    head = compare_table([strong, weak], keys="ood/*/AUROC").splitlines()[0]
    assert [cell.strip() for cell in head.split("|")[2:-1]] == [
        "ood/noise/AUROC ↑",
        "ood/far/AUROC ↑",
        "ood/mean/AUROC ↑",
    ]
    assert "ood/far/energy/AUROC" in compare_table([strong], keys="ood/**/AUROC")
    with pytest.raises(DataError, match="'ood/nope'"):
        compare_table([strong], keys=["ood/nope"])
    with pytest.raises(DataError, match="no results"):
        compare_table([])


def test_missing_figures_are_dashes(strong):
    bare = Results("bare", {"cls/Acc": 0.5})
    assert "–" in compare_table([strong, bare])


def test_markdown_of_one_shows_everything(strong):
    assert len(strong.to_markdown().splitlines()) == len(strong) + 2


def test_intervals_hold_their_figure_and_shrink_with_data(strong):
    assert strong.intervals.keys() == strong.figures.keys()
    for key in ("cls/Acc", "cls/NLL", "ood/noise/AUROC", "ood/mean/AUROC"):
        low, high = strong.interval(key)
        assert low < strong[key] < high
    # the width of the interval of a share is 2 * 1.96 * sqrt(p (1 - p) / n)
    low, high = strong.interval("cls/Acc")
    p = strong["cls/Acc"]
    assert high - low == pytest.approx(3.92 * math.sqrt(p * (1 - p) / 300), rel=0.25)


def test_intervals_are_reproducible_and_seeded():
    first, again, other = (
        evaluate(WEAK, TEST, bootstrap=20, seed=seed).intervals for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_a_better_model_is_found_better(strong, weak):
    comparison = compare(strong, weak, count=100)
    row = comparison["cls/Acc"]
    assert row.difference == pytest.approx(strong["cls/Acc"] - weak["cls/Acc"])
    assert 0 < row.low < row.difference < row.high
    assert row.p < 0.05
    assert "ood/noise/energy/AUROC" in comparison
    assert "| cls/Acc " in repr(comparison) and r"five \| strong" in repr(comparison)
    back = compare(weak, strong, count=100)
    assert back["cls/Acc"].low == pytest.approx(-row.high)


def test_a_model_against_itself_shows_nothing(weak):
    for row in compare(weak, weak, count=50).values():
        assert (row.difference, row.low, row.high, row.p) == (0.0, 0.0, 0.0, 1.0)


def test_pairing_is_what_makes_it_sharp(strong, weak):
    """Two nearly equal models: the paired interval is narrower than the two intervals suggest."""
    near = evaluate(Ensemble(5, sharp=4.01), TEST, bootstrap=200, name="near")
    paired = compare(evaluate(Ensemble(5), TEST, name="a"), near, count=200)["cls/NLL"]
    low, high = near.interval("cls/NLL")
    assert paired.high - paired.low < 0.1 * (high - low)


def test_comparisons_need_the_same_data(strong, weak):
    with pytest.raises(DataError, match="no examples"):
        compare(Results.from_json(strong.to_json()), weak)
    with pytest.raises(DataError, match=r"other labels.*'id'"):
        compare(weak, evaluate(WEAK, batches(X.flip(0), Y.flip(0)), name="shuffled"))
    with pytest.raises(DataError, match=r"300 .*'id'.* 200"):
        compare(weak, evaluate(WEAK, batches(X[:200], Y[:200]), name="short"))
    with pytest.raises(DataError, match="main score"):
        compare(weak, evaluate(WEAK, TEST, score="energy", name="energetic"))


def test_several_results_stand_for_their_mean(strong, weak):
    alone = compare(strong, weak, count=60)
    twice = compare([strong, strong], [weak], count=60)
    mixed = compare([strong, weak], weak, count=60)
    for key, row in alone.items():
        assert twice[key] == row
        assert mixed[key].difference == pytest.approx(row.difference / 2, abs=1e-12)
        assert mixed[key].low == pytest.approx(row.low / 2, abs=1e-12)
    with pytest.raises(DataError, match="empty"):
        compare([], weak)


def test_scaled_columns_have_intervals_too():
    scaled = evaluate(WEAK, TEST, temperature=1.0, bootstrap=30)
    assert scaled.interval("post/cls/NLL") == pytest.approx(scaled.interval("cls/NLL"))


def test_a_data_frame_holds_all_figures(strong, weak):
    pandas = pytest.importorskip("pandas")
    frame = strong.to_pandas()
    assert list(frame.columns) == ["model", "figure", "value", "low", "high"]
    assert dict(zip(frame["figure"], frame["value"], strict=True)) == strong.figures
    row = frame.set_index("figure").loc["cls/NLL"]
    assert (row["low"], row["high"]) == strong.interval("cls/NLL")
    both = pandas.concat([frame, weak.to_pandas()]).pivot(
        index="figure", columns="model", values="value"
    )
    assert both.loc["cls/Acc", "weak_one"] == weak["cls/Acc"]
