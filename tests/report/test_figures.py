"""Pictures show the numbers that the results hold."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from hydra_ensembles.errors import DataError
from hydra_ensembles.report.curves import answered_at, reliability, risk_curve, roc, thin
from hydra_ensembles.report.figures import (
    plot_cost_quality,
    plot_head_map,
    plot_reliability,
    plot_risk_coverage,
    plot_roc,
)

from .made import MASKS, results_of, three_results


def test_the_area_under_the_drawn_roc_is_the_auroc() -> None:
    result = results_of("one", noise=0.5)
    x, y = np.array(roc(result, "near")).T
    assert np.trapezoid(y, x) == pytest.approx(result["ood/near/AUROC"], abs=2e-3)
    ax = plot_roc([result], "near")
    assert ax.lines[0].get_label().startswith("one: AUROC")
    assert ax.lines[0].get_xydata()[-1].tolist() == [1, 1]


def test_the_drawn_bars_give_the_ece() -> None:
    result = results_of("one", noise=0.5)
    bars = reliability(result)
    total = sum(bar.count for bar in bars)
    error = sum(bar.count * abs(bar.accuracy - bar.confidence) for bar in bars) / total
    assert total == 240 and error == pytest.approx(result["cal/ECE"], abs=1e-6)
    ax = plot_reliability(result)
    assert [p.get_height() for p in ax.patches] == pytest.approx([b.accuracy for b in bars])


def test_risk_ends_at_the_error_rate() -> None:
    result = results_of("one", noise=0.5)
    coverage, risk = risk_curve(result)[-1]
    assert coverage == 1 and risk == pytest.approx(1 - result["cls/Acc"])
    assert len(plot_risk_coverage(three_results()).lines) == 3


def test_thresholds_of_the_slider() -> None:
    result = results_of("one", noise=0.5)
    table = answered_at(result)
    assert table["coverage"][-1] == 1 and table["risk"][-1] == pytest.approx(1 - result["cls/Acc"])
    assert table["coverage"] == sorted(table["coverage"]) and len(table["ood/near"]) == 100
    assert table["coverage"][49] == pytest.approx(0.5)


def test_thinning_keeps_the_ends() -> None:
    points = [(float(i), float(i)) for i in range(1000)]
    assert thin(points, 10)[0] == (0, 0) and thin(points, 10)[-1] == (999, 999)
    assert len(thin(points, 10)) == 10
    assert thin([(0.0, 0.0)] * 5) == [(0.0, 0.0)]


def test_head_maps_fill_what_is_kept() -> None:
    ax = plot_head_map(MASKS)
    filled = [len(c.get_offsets()) for c in ax.collections if len(c.get_facecolor())]
    assert sum(filled) == sum(mask.total_kept for mask in MASKS)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["member 1", "member 2", "member 3"]


def test_the_frontier_leaves_out_what_is_beaten() -> None:
    points = {"a": (1.0, 0.8), "b": (1.1, 0.9), "beaten": (2.0, 0.85), "c": (3.0, 0.95)}
    line = plot_cost_quality(points).lines[0].get_xydata().tolist()
    assert line == [[1.0, 0.8], [1.1, 0.9], [3.0, 0.95]]
    lower = plot_cost_quality({"a": (1.0, 0.8), "b": (1.1, 0.9)}, figure="cls/NLL")
    assert lower.lines[0].get_xydata().tolist() == [[1.0, 0.8]]


def test_given_axes_are_drawn_on() -> None:
    ax = Figure().subplots()
    assert plot_head_map(MASKS[0], ax=ax) is ax
    assert plot_reliability(results_of("one", noise=0.5), ax=ax) is ax


def test_what_cannot_be_drawn_says_why() -> None:
    from hydra_ensembles import Results

    bare = Results(name="bare", figures={"cls/Acc": 0.9})
    with pytest.raises(DataError, match="hold no examples"):
        plot_reliability(bare)
    with pytest.raises(DataError, match="no results"):
        plot_risk_coverage([])
    with pytest.raises(DataError, match="no masks"):
        plot_head_map([])
    with pytest.raises(DataError, match="no points"):
        plot_cost_quality({})


def test_names_of_close_points_do_not_cover_each_other() -> None:
    points = {"single": (1.0, 0.183), "with a temperature": (1.0, 0.179), "novelty": (0.99, 0.179)}
    ax = plot_cost_quality(points, figure="cls/NLL")
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == 3
    pairs = [(one, other) for one in boxes for other in boxes if one is not other]
    assert not any(one.overlaps(other) for one, other in pairs)
