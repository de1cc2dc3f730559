"""Novelty: statistics, distances, p-values and the detector, against their definitions."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from sklearn.covariance import ledoit_wolf as reference_ledoit_wolf
from sklearn.covariance import oas as reference_oas
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.uncertainty import distances
from hydra_ensembles.uncertainty.distances import Term, unit
from hydra_ensembles.uncertainty.moments import (
    Moments,
    Scatter,
    class_distance,
    global_distance,
    ledoit_wolf,
    oracle_approximating,
    whiten,
)
from hydra_ensembles.uncertainty.novelty import Novelty, Ranks, from_tensors
from hydra_ensembles.uncertainty.novelty_fit import NoveltyFit

TAPS, WIDTH, CLASSES = 3, 6, 4


def known(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw features around class centres, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, TAPS, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, TAPS, WIDTH, generator=draw)
    return centres[labels] + noise * torch.linspace(0.3, 1.5, WIDTH), labels


def logits_of(count: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(count, 2, CLASSES, generator=torch.Generator().manual_seed(seed + 50))


def moments_of(features: Tensor, labels: Tensor | None = None) -> Moments:
    moments = Moments.empty(TAPS, WIDTH, 0 if labels is None else CLASSES)
    moments.add_(features, labels)
    return moments


def fitted(
    count: int = 200, *, labels: bool = True, seed: int = 0, uses_last_block: bool = True
) -> Novelty:
    features, classes = known(count, seed)
    taps = [f"tap {i}" for i in range(TAPS)]
    fit = NoveltyFit(
        taps, classes=CLASSES, class_taps=2, uses_last_block=uses_last_block, choose=False
    )
    fit.add_(features, logits_of(count, seed), classes if labels else None)
    return fit.finish()


def test_moments_do_not_depend_on_chunks_or_order() -> None:
    features, labels = known(57)
    whole = moments_of(features, labels)
    order = torch.randperm(57, generator=torch.Generator().manual_seed(3))
    parts = Moments.empty(TAPS, WIDTH, CLASSES)
    for rows in order.split(8):
        parts.add_(features[rows], labels[rows])
    for name in ("total", "outer", "class_totals"):
        assert whole.outer is not None and parts.outer is not None
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-10)
    assert parts.class_counts.tolist() == whole.class_counts.tolist()


def test_scatters_are_those_of_numpy() -> None:
    features, labels = known()
    moments = moments_of(features, labels)
    rows = unit(features.double())
    for tap in range(TAPS):
        expected = torch.cov(rows[:, tap].T, correction=0) * len(rows)
        torch.testing.assert_close(moments.scatter(tap).factor, expected)
        within = sum(
            torch.cov(rows[labels == c, tap].T, correction=0) * int((labels == c).sum())
            for c in range(CLASSES)
        )
        torch.testing.assert_close(moments.within_scatter(tap).factor, within)


def test_ridge_is_that_of_scikit_learn() -> None:
    features, _ = known(25)
    moments = moments_of(features)
    for tap in range(TAPS):
        scatter = moments.scatter(tap)
        ridge = ledoit_wolf(moments.count, moments.mean()[tap], scatter)
        rows = unit(features.double())[:, tap]
        _, share = reference_ledoit_wolf(rows.numpy())
        level = float(scatter.trace()) / 25 / WIDTH
        assert float(ridge) == pytest.approx(level * share / (1 - share), rel=1e-6)


def test_shrinkage_is_that_of_scikit_learn() -> None:
    features, _ = known(25)
    centred = unit(features.double()) - unit(features.double()).mean(0)
    for tap in range(TAPS):
        scatter = Scatter(centred[:, tap].T @ centred[:, tap], thin=False)
        ridge = oracle_approximating(25, scatter)
        _, share = reference_oas(centred[:, tap].numpy(), assume_centered=True)
        level = float(scatter.trace()) / 25 / WIDTH
        assert float(ridge) == pytest.approx(level * share / (1 - share), rel=1e-6)


def test_held_out_ranks_leave_the_example_out() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0], [7.0]])
    ranks = Ranks.of(values)
    found = ranks.held_out_surprise(values)[:, 0]
    for i in range(4):
        others = Ranks.of(values[torch.arange(4) != i])
        expected = Ranks(others.values, ranks.scale).surprise(values[i : i + 1])[0, 0]
        torch.testing.assert_close(found[i], expected)


def test_held_out_distance_is_the_distance_without_the_example() -> None:
    features, _ = known(30)
    rows = unit(features.double())
    moments = moments_of(features)
    mean = moments.mean()
    ridge = [ledoit_wolf(30, mean[tap], moments.scatter(tap)) for tap in range(TAPS)]
    held_out = global_distance(moments).held_out(rows)
    for i in (0, 7, 29):
        others = torch.cat([rows[:i], rows[i + 1 :]])
        for tap in range(TAPS):
            centre = others[:, tap].mean(0)
            apart = others[:, tap] - centre
            sigma = apart.T @ apart / 29 + ridge[tap] * torch.eye(WIDTH)
            z = rows[i, tap] - centre
            expected = z @ torch.linalg.solve(sigma.double(), z)
            # of first order in the ridge's share, 1 / 30: what is left is of second order
            torch.testing.assert_close(held_out[i, tap], expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("width", [64, 160])
def test_false_alarms_of_data_that_spreads_evenly(width: int, labelled: bool) -> None:
    """In many equal directions the ridge is nearly all of the covariance."""
    generator = torch.Generator().manual_seed(0)
    alarms = []
    for _ in range(16):
        features = torch.randn(1200, 4, width, generator=generator)
        logits = torch.randn(1200, 1, 5, generator=generator)
        fitted = NoveltyFit(["a", "b", "c", "d"], classes=5, class_taps=3, choose=False)
        fitted.add_(features[:200], logits[:200], torch.arange(200) % 5 if labelled else None)
        novelty, _ = fitted.finish()(features[200:], logits[200:])
        alarms.append((novelty > 0.95).double().mean())
    assert 0.04 < torch.stack(alarms).mean() < 0.06  # up to 18.5 % without the ridge's term


def test_held_out_class_distance_is_the_distance_without_the_example() -> None:
    features, labels = known(30)
    labels[0] = labels[4] = 3
    labels[5:] = labels[5:].clamp_max(2)  # class 3 has few
    labels[4] = 2
    labels[3] = 2  # class 3 has example 0 only
    rows = unit(features.double())
    moments = moments_of(features, labels)
    held_out = class_distance(moments).held_out(rows, labels)
    classes = int((moments.class_counts > 0).sum())
    within = [moments.within_scatter(tap) for tap in range(TAPS)]
    ridge = [oracle_approximating(30 - classes, scatter) for scatter in within]
    for i in (0, 7, 29):
        keep = torch.arange(30) != i
        for tap in range(TAPS):
            others, their = rows[keep, tap], labels[keep]
            present = their.unique()
            centres = torch.stack([others[their == c].mean(0) for c in present])
            apart = others - centres[torch.searchsorted(present, their)]
            sigma = apart.T @ apart / 29 + ridge[tap] * torch.eye(WIDTH).double()
            z = rows[i, tap] - centres
            expected = (z * torch.linalg.solve(sigma, z.T).T).sum(-1).min()
            torch.testing.assert_close(held_out[i, tap], expected, rtol=1e-3, atol=0)


def wide(count: int, width: int = 96) -> tuple[Tensor, Tensor]:
    """Draw features whose directions vary by a factor of a thousand, as those of hosts do."""
    draw = torch.Generator().manual_seed(1)
    scale = torch.logspace(0, -3, width)
    centres = torch.randn(CLASSES, TAPS, width, generator=draw) * scale
    labels = torch.arange(count) % CLASSES
    return 1 + centres[labels] + torch.randn(count, TAPS, width, generator=draw) * scale, labels


def test_few_examples_of_a_wide_host_have_the_distances_of_the_full_covariance() -> None:
    features, labels = wide(40)
    thin = Moments.empty(TAPS, 96, CLASSES)
    thin.add_(features[:25], labels[:25])
    thin.add_(features[25:], labels[25:])
    full = copy.deepcopy(thin)
    rows = unit(features.double())
    full.outer = torch.einsum("nti,ntj->tij", rows, rows)
    assert thin.outer is None
    new = unit(wide(60)[0].double())[40:]
    for fit in (global_distance, class_distance):
        ours, theirs = fit(thin), fit(full)
        assert ours.whitening.level is not None and theirs.whitening.level is None
        assert ours.whitening.matrix.shape == (TAPS, 96, 40)
        torch.testing.assert_close(ours(new), theirs(new), rtol=1e-9, atol=0)
    held_out = [global_distance(moments).held_out(rows) for moments in (thin, full)]
    torch.testing.assert_close(*held_out, rtol=1e-9, atol=0)
    held_out = [class_distance(moments).held_out(rows, labels) for moments in (thin, full)]
    torch.testing.assert_close(*held_out, rtol=1e-9, atol=0)


def test_more_examples_than_half_the_width_become_sums() -> None:
    features, labels = wide(60)
    moments = Moments.empty(TAPS, 96, CLASSES)
    for rows in torch.arange(60).split(16):
        moments.add_(features[rows], labels[rows])
    assert moments.outer is not None and not moments.rows
    expected = torch.cov(unit(features.double())[:, 1].T, correction=0) * 60
    torch.testing.assert_close(moments.scatter(1).factor, expected)


def test_a_wide_host_saves_its_statistics_thin() -> None:
    features, labels = wide(40)
    fit = NoveltyFit([f"tap {i}" for i in range(TAPS)], classes=CLASSES, class_taps=2)
    fit.add_(features, logits_of(40), labels)
    novelty = fit.finish()
    tensors = novelty.tensors()
    assert tensors["distance.whitening"].shape == (TAPS, 96, 40)
    twin = from_tensors(tensors, novelty.facts())
    new, _ = wide(60)
    assert torch.equal(novelty(new, logits_of(60))[1], twin(new, logits_of(60))[1])


def test_rounding_that_breaks_the_cholesky_factor_falls_back() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-3, -1e-9]).double())
    whitening = whiten(1, Scatter(matrix, thin=False), torch.tensor(1e-10).double())
    expected = torch.tensor([1.0, 1e-3, 1e-10]).double() + torch.tensor([1e-10, 1e-10, 0])
    sigma = torch.linalg.inv(whitening.matrix @ whitening.matrix.T).diagonal()
    torch.testing.assert_close(sigma, expected)


def test_many_classes_are_measured_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = known(60)
    classes = class_distance(moments_of(features, labels))
    rows = unit(features.double())
    whole = classes(rows), classes.held_out(rows, labels)
    monkeypatch.setattr(distances, "CLASSES", 3)
    monkeypatch.setattr(distances, "CELLS", 40)
    steps = replace(classes)  # without the cached lengths
    torch.testing.assert_close((steps(rows), steps.held_out(rows, labels)), whole)


def test_float32_is_enough_for_narrow_classes() -> None:
    """Features that hardly differ: whitened, they are thousands of times longer than apart."""
    features, labels = known(400)
    narrow = 10 + 1e-2 * features
    fit = NoveltyFit([f"tap {i}" for i in range(TAPS)], classes=CLASSES, class_taps=TAPS)
    fit.add_(narrow, logits_of(400), labels)
    novelty = fit.finish()
    fresh, _ = known(400, seed=77)
    value, _ = novelty(10 + 1e-2 * fresh, logits_of(400, seed=77))
    assert 0.02 < float((value > 0.95).float().mean()) < 0.09


def test_p_values_count_and_continue() -> None:
    ranks = Ranks.of(torch.arange(1.0, 10.0)[:, None])
    values = torch.tensor([[0.0], [1.0], [5.0], [9.0]])
    expected = torch.tensor([10, 10, 6, 2]) / 10
    torch.testing.assert_close(ranks.surprise(values)[:, 0].neg().exp(), expected)
    beyond = ranks.surprise(torch.tensor([[9.5], [10.0], [1e4], [1e9]]))[:, 0]
    assert bool((beyond.diff() > 0).all()) and float(beyond[0]) > float(torch.tensor(10.0).log())


def test_constant_terms_say_nothing() -> None:
    ranks = Ranks.of(torch.full((20, 1), 3.0))
    assert float(ranks.surprise(torch.tensor([[3.0]]))) == pytest.approx(0.0)


@pytest.mark.parametrize("uses_last_block", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_new_known_data_alarm_at_the_promised_rate(labels: bool, uses_last_block: bool) -> None:
    rates = []
    for seed in range(6):
        novelty = fitted(150, labels=labels, seed=seed, uses_last_block=uses_last_block)
        fresh, _ = known(400, seed=100 + seed)
        value, _ = novelty(fresh, logits_of(400, seed=100 + seed))
        rates.append(float((value > 0.9).float().mean()))
    assert 0.07 < sum(rates) / len(rates) < 0.13


def fitted_with_training(known_count: int, seed: int, *, labels: bool = True) -> Novelty:
    taps = [f"tap {i}" for i in range(TAPS)]
    fit = NoveltyFit(taps, classes=CLASSES, class_taps=2, uses_last_block=True, choose=False)
    features, classes = known(400, seed=1000 + seed)
    fit.add_train_(features, logits_of(400, seed), classes if labels else None)
    features, _ = known(known_count, seed)
    fit.add_(features, logits_of(known_count, seed))
    return fit.finish()


def test_training_data_gives_the_distances_and_known_data_the_ranks() -> None:
    novelty = fitted_with_training(50, 0)
    features, classes = known(400, seed=1000)
    moments = moments_of(features, classes)
    rows = unit(known(50)[0].double())
    expected = global_distance(moments)(rows).sort(0).values.T[:2]  # of the trunk's taps
    torch.testing.assert_close(novelty.ranks.values[:2].double(), expected, rtol=1e-4, atol=0)
    assert (novelty.examples, novelty.trained) == (50, 400)
    assert novelty.classes is not None  # the known data has no labels
    assert "50 known examples, distances of 400 training examples" in str(novelty)


@pytest.mark.parametrize("labels", [False, True])
def test_training_data_keeps_the_rate_of_false_alarms(labels: bool) -> None:
    rates = []
    for seed in range(40):
        novelty = fitted_with_training(150, seed, labels=labels)
        value, _ = novelty(known(400, seed=100 + seed)[0], logits_of(400, seed=100 + seed))
        rates.append(float((value > 0.9).float().mean()))
    assert 0.09 < sum(rates) / len(rates) < 0.11


def test_training_data_comes_first() -> None:
    fit = NoveltyFit(["tap"])
    fit.add_(torch.randn(12, 1, 4), logits_of(12))
    with pytest.raises(DataError, match="before the known"):
        fit.add_train_(torch.randn(3, 1, 4), logits_of(3))


def test_outliers_are_new_and_farther_ones_are_newer() -> None:
    novelty = fitted()
    features, _ = known(20, seed=5)
    logits = logits_of(20, seed=5)
    # unit vectors cannot leave the sphere: turn towards a direction that known data do not have
    foreign = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)))
    far = foreign.Q[0] * 5
    steps = [novelty(features + step * far, logits) for step in (0.0, 0.5, 5.0)]
    means = [float(score.mean()) for _, score in steps]
    assert means[0] < means[1] < means[2]
    assert float(steps[2][0].min()) > 0.9


def test_class_distances_need_enough_examples_per_class() -> None:
    assert fitted(200).classes is not None
    assert fitted(200, labels=False).classes is None
    assert fitted(12).classes is None  # three per class
    features, classes = known(60)
    fit = NoveltyFit([f"tap {i}" for i in range(TAPS)], classes=CLASSES, class_taps=2)
    fit.add_(features, logits_of(60), classes % 2)
    assert fit.finish().classes is None  # two classes: the probability tells them apart


def test_the_last_block_has_a_weight_of_its_own() -> None:
    def weights(*, labels: bool = True, uses_last_block: bool = True) -> dict[Term, float]:
        novelty = fitted(labels=labels, uses_last_block=uses_last_block)
        return dict(zip(novelty.chosen, novelty.weights.tolist(), strict=True))

    trunk = {("distance", 0): 2, ("distance", 1): 2}
    end = {("relative", 1): 1, ("class", 2): 2}  # of the end, the distance itself
    assert weights() == {**trunk, **end, ("gen", -1): 1}
    assert weights(labels=False) == {**trunk, ("distance", 2): 0.5, ("gen", -1): 1}
    every = {("distance", tap): pytest.approx(4 / 3) for tap in range(3)}
    late = {("relative", 1): 1, ("relative", 2): 1}
    assert weights(uses_last_block=False) == {**every, **late, ("gen", -1): 1}


def test_statistics_survive_as_plain_data() -> None:
    novelty = fitted()
    twin = from_tensors(novelty.tensors(), novelty.facts())
    features, _ = known(9, seed=4)
    for ours, theirs in zip(
        novelty(features, logits_of(9)), twin(features, logits_of(9)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_evidence_names_terms_and_neighbours() -> None:
    features, classes = known(40)
    fit = NoveltyFit(["early", "late"], classes=CLASSES, class_taps=1)
    fit.add_(features[:, :2], logits_of(40), classes)
    novelty = fit.finish([f"file {i}" for i in range(40)])
    evidence = novelty.explain(features[7:8, :2], logits_of(40)[7:8])
    assert int(evidence.neighbours[0, 0]) == 7
    assert float(evidence.similarity[0, 0]) == pytest.approx(1.0)
    text = str(evidence)
    assert "file 7 (1.00)" in text and "novelty" in text
    assert novelty.terms == ("early", "late", "late, nearest class (relative)", "probability")
    torch.testing.assert_close(evidence.surprise @ novelty.weights, evidence.score)
    assert float(novelty.weights.sum()) == pytest.approx(7.0)


def test_too_few_and_broken_known_data_are_refused() -> None:
    with pytest.raises(DataError, match="10 known"):
        fitted(4)
    fit = NoveltyFit(["tap"])
    with pytest.raises(DataError, match="NaN or infinity"):
        fit.add_(torch.full((3, 1, 4), torch.nan), logits_of(3))
