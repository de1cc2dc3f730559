"""Benchmarks: paired ratios, counts, memory, tables and pictures of real models."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs.formula import cost
from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.evaluation.benchmark_result import BenchmarkResult, PeakMemory, paired_ratio
from hydra_ensembles.evaluation.latency import benchmark
from tests import zoo

mpl.use("Agg")
MASKS = [HeadMask([[1] * 4, [1] * 4, row]) for row in ([1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1])]


def run(**options: object) -> BenchmarkResult:
    model = zoo.host("vit")
    models = {"single": model, "hydra": hydra.fuse(model, MASKS)}
    settings = {"batch_sizes": (1, 3), "rounds": 4, "warmup": 1, "progress": False, **options}
    return benchmark(models, zoo.batch("vit"), **settings)  # type: ignore[arg-type]


def test_counts_memory_and_shape_of_the_result() -> None:
    result = run(min_sample_seconds=0.0)
    assert result.names == ["single", "hydra"]
    assert result.batch_sizes == [1, 3]
    for name in result.names:
        assert len(result[name, 3].seconds) == 4
        assert result[name, 3].multiply_adds == 3 * result[name, 1].multiply_adds
        assert result[name, 3].throughput == pytest.approx(3 / result[name, 3].latency)
    one = zoo.batch("vit", size=1)
    host, ensemble = cost(zoo.host("vit"), one), cost(hydra.fuse(zoo.host("vit"), MASKS), one)
    expected = ensemble.relative_to(host).multiply_adds
    assert result.counted("hydra", 1) == pytest.approx(expected, rel=0.01)
    assert tuple(result.ratio("single", 1)) == (1.0, 1.0, 1.0)
    stored = sum(p.numel() * p.element_size() for p in zoo.host("vit").parameters())
    assert result["single", 1].weight_bytes == pytest.approx(stored, rel=0.01)
    assert result["single", 3].activation_bytes > result["single", 1].activation_bytes
    with pytest.raises(DataError, match=r"'other'.*batch 1"):
        result["other", 1]


class Busy(nn.Module):
    """A model whose work is known: so many products of one matrix."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(400))
        self.times = times
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        for _ in range(self.times):
            x = x @ self.weight
        return x


def test_four_times_the_work_is_measured_and_counted() -> None:
    light, heavy = Busy(2), Busy(8)
    result = benchmark(
        {"light": light, "heavy": heavy},
        torch.randn(2, 400),
        batch_sizes=[400],
        rounds=15,
        threads=1,
        progress=False,
    )
    assert result.counted("heavy", 400) == 4.0
    ratio = result.ratio("heavy", 400)
    assert 2.0 < ratio.value < 8.0  # a busy machine may disturb it, not by a factor of two
    assert ratio.low <= ratio.value <= ratio.high
    assert set(light.calls) == {400}


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            order.append(self.name)
            return x

    names = ["a", "b", "c"]
    models = {name: Named(name) for name in names}
    options = {"rounds": 6, "warmup": 0, "min_sample_seconds": 0.0, "progress": False}
    benchmark(models, torch.zeros(1, 1), batch_sizes=[1], **options)  # type: ignore[arg-type]
    timed = order[-18:]
    rounds = [timed[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "the order changes"


def test_paired_ratios_do_not_see_what_slows_both() -> None:
    base = [1.0, 5.0, 1.0, 9.0, 2.0]
    ratio = paired_ratio([1.1 * b for b in base], base)
    assert ratio.value == pytest.approx(1.1)
    assert (ratio.low, ratio.high) == pytest.approx((1.1, 1.1))


def test_models_keep_their_mode_threads_and_type() -> None:
    model = zoo.make("vit").train()
    threads = torch.get_num_threads()
    result = benchmark(
        {"single": model},
        {"pixel_values": zoo.batch("vit"), "labels": torch.zeros(4, dtype=torch.long)},
        batch_sizes=[2],
        rounds=1,
        threads=threads + 1,
        dtype=torch.bfloat16,
        progress=False,
    )
    assert model.training
    assert torch.get_num_threads() == threads
    assert next(model.parameters()).dtype == torch.float32
    assert (result.settings["dtype"], result.settings["threads"]) == ("bfloat16", threads + 1)


def test_time_limit_keeps_three_rounds() -> None:
    assert len(run(rounds=50, max_seconds=0.0)["hydra", 1].seconds) == 3


def test_peak_memory_is_what_lives_at_once() -> None:
    x = torch.randn(1000)
    with PeakMemory() as memory:
        y = x + 1  # 4000 bytes
        z = y.view(10, 100) * 2  # 4000 more, the view is free
        y.add_(1)
        del y
        w = z + 1  # y has gone
    assert memory.peak == 8000
    assert memory.alive == 8000
    del z, w
    assert memory.alive == 0


def test_saved_results_print_and_draw(tmp_path: Path) -> None:
    from hydra_ensembles.report.svg import save
    from hydra_ensembles.research.figures import plot_benchmark

    result = run()
    path = tmp_path / "deep" / "result.json"
    result.to_json(path)
    again = BenchmarkResult.from_json(path)
    assert again == result
    assert again.table() == result.table()
    assert "paired ratios to 'single'" in str(result)
    ax = plot_benchmark(result)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["single", "hydra"]
    save(ax, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    with pytest.raises(FormatError, match="BenchmarkResult"):
        BenchmarkResult.from_json('{"kind": "other"}')


def test_growth_and_frontier_draw() -> None:
    from hydra_ensembles.research.cost_frontier import Frontier, Point
    from hydra_ensembles.research.figures import plot_frontier, plot_growth

    model = zoo.host("vit")
    models = {"single": model, "1": hydra.fuse(model, MASKS[:1]), "2": hydra.fuse(model, MASKS[:2])}
    result = benchmark(models, zoo.batch("vit"), batch_sizes=[1], rounds=2, progress=False)
    ax = plot_growth(result)
    assert ax.get_xlabel() == "members M"
    rows = result.rows()
    points = [{"tokens": 64, "rows": rows}, {"tokens": 128, "rows": rows}]
    assert plot_growth({"shape": "vit", "points": points}).get_xlabel() == "tokens"
    curve = Frontier(
        (Point(2, (4, 4, 2), 0.95, 0.5, ()), Point(1, (4, 2, 2), 1.2, 0.3, ())), 1.07, "NLL"
    )
    ax = plot_frontier(curve)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "chosen" in labels
    assert curve.chosen is curve.points[0]


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(DataError, match="Expected models by name"):
        benchmark({}, torch.zeros(1))
    with pytest.raises(DataError, match="positive"):
        benchmark({"single": zoo.host("vit")}, zoo.batch("vit"), rounds=0)
