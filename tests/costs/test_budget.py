"""Budgets are kept whatever heads are chosen; the frontier marks the best point within."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HeadScores
from hydra_ensembles.costs.budget import (
    Budget,
    branch_options,
    budgeted_masks,
    deal,
    fit_budget,
    option_cost,
)
from hydra_ensembles.costs.formula import CostModel
from hydra_ensembles.errors import MaskError
from hydra_ensembles.research.cost_frontier import Frontier, frontier
from tests import zoo


def scores(seed: int) -> HeadScores:
    draws = torch.Generator().manual_seed(seed)
    return HeadScores(torch.rand(zoo.LAYERS, zoo.HEADS, generator=draws))


@pytest.mark.parametrize("name", ["vit", "bert", "clip-text", "dinov2", "timm-unusual"])
def test_options_fit_and_one_more_head_would_not(name: str) -> None:
    counter = CostModel(zoo.host(name), zoo.batch(name))
    for limit in (1.0, 1.3, 2.0):
        options = branch_options(counter, members=3, max_cost=limit, batch=None, at_most=1.0)
        layers = [option.branch_layer for option in options]
        assert layers == sorted(layers, reverse=True)
        for option in options:
            assert option.cost <= limit
            assert option.keep_per_layer[: option.branch_layer] == (4,) * option.branch_layer
            for layer in range(option.branch_layer, zoo.LAYERS):
                more = list(option.keep_per_layer)
                more[layer] += 1
                full = more[layer] > zoo.HEADS - (layer == option.branch_layer)
                assert full or option_cost(counter, option.branch_layer, more, 3) > limit


@settings(max_examples=30, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    limit=st.floats(0.95, 2.5),
    shared=st.booleans(),
)
def test_any_chosen_heads_stay_within_the_budget(
    seeds: list[int], limit: float, shared: bool
) -> None:
    counter = CostModel(zoo.host("vit"), zoo.batch("vit"))
    members = len(seeds)
    tables = scores(seeds[0]) if shared else [scores(seed) for seed in seeds]
    try:
        masks = budgeted_masks(counter, tables, members=members, max_cost=limit, batch=None)
    except MaskError:
        assert not branch_options(counter, members=members, max_cost=limit, batch=None)
        return
    assert len(masks) == members
    assert counter.ratio(masks) <= limit + 1e-9


def test_the_counted_budget_is_the_ensembles_own_cost() -> None:
    model, inputs = zoo.host("vit"), zoo.batch("vit")
    masks = budgeted_masks(model, scores(0), members=2, max_cost=1.2, batch=inputs)
    ensemble = hydra.fuse(model, masks)
    from hydra_ensembles.costs.formula import cost

    ratio = cost(ensemble, inputs).relative_to(cost(model, inputs)).multiply_adds
    assert ratio <= 1.2
    assert ratio == pytest.approx(CostModel(model, inputs).ratio(masks), rel=1e-6)


def test_members_take_turns_at_the_best_heads() -> None:
    table = HeadScores([[0.9, 0.1, 0.8, 0.7, 0.2, 0.6]])
    masks = deal(table, [2], members=3)
    assert [mask.indices(0) for mask in masks] == [[0, 5], [2, 4], [1, 3]]
    wide = deal(table, [4], members=3)
    assert [mask.kept for mask in wide] == [(4,)] * 3
    assert max(sum(mask[0] for mask in wide)) == 2  # type: ignore[call-overload]
    assert deal(HeadScores([[1.0, 1.0]]), [1], members=2) == [
        HeadMask([[1, 0]]),
        HeadMask([[0, 1]]),
    ]


def test_a_larger_budget_branches_earlier() -> None:
    counter = CostModel(zoo.host("vit"), zoo.batch("vit"))
    layers = [
        fit_budget(counter, members=3, max_cost=limit, batch=None).branch_layer
        for limit in (0.9, 1.6, 2.6)
    ]
    assert layers == sorted(layers, reverse=True)
    assert layers[0] == zoo.LAYERS - 1
    assert layers[-1] == 0


@pytest.mark.parametrize("name", ["vit", "bert", "timm-unusual"])
def test_heads_of_one_pruned_model_fill_its_budget(name: str) -> None:
    counter = CostModel(zoo.host(name), zoo.batch(name))
    for layers in (None, [0, 2]):
        chosen = range(zoo.LAYERS) if layers is None else layers
        least = HeadScores(torch.ones(zoo.LAYERS, zoo.HEADS)).top_k(
            [1 if layer in chosen else zoo.HEADS for layer in range(zoo.LAYERS)]
        )
        low, high = counter.ratio([least]), counter.ratio([HeadMask.full(counter.host)])
        for limit in (low, (low + high) / 2, high):
            counts = Budget.of(counter, None, limit + 1e-9).heads(layers)
            assert all(counts[i] == zoo.HEADS for i in range(zoo.LAYERS) if i not in chosen)
            assert counter.ratio([scores(1).top_k(list(counts))]) <= limit + 1e-8
            for layer in chosen:
                more = list(counts)
                more[layer] = min(zoo.HEADS, more[layer] + 1)
                mask = scores(1).top_k(more)
                assert more == list(counts) or counter.ratio([mask]) > limit
        with pytest.raises(MaskError, match="1 member of"):
            Budget.of(counter, None, 0.9 * low).heads(layers)


def test_a_given_number_of_heads_decides_where_members_part() -> None:
    counter = CostModel(zoo.host("vit"), zoo.batch("vit"))
    free = Budget.of(counter, None, None)
    assert free.option(3, keep=2).branch_layer == 0
    option = Budget.of(counter, None, 1.3).option(3, keep=2)
    assert option.cost <= 1.3 < option_cost(counter, option.branch_layer - 1, [2] * zoo.LAYERS, 3)
    assert Budget.of(counter, None, 1.3).option(3) == fit_budget(
        counter, members=3, max_cost=1.3, batch=None
    )
    with pytest.raises(MaskError, match="3 members"):
        Budget.of(counter, None, 0.3).option(3, keep=2)


def test_errors_say_what_would_fit() -> None:
    model, inputs = zoo.host("vit"), zoo.batch("vit")
    with pytest.raises(MaskError, match=r"3 members.*cost 0\.\d+ x"):
        fit_budget(model, members=3, max_cost=0.3, batch=inputs)
    with pytest.raises(MaskError, match="2 score tables"):
        budgeted_masks(model, [scores(0), scores(1)], members=3, batch=inputs)
    with pytest.raises(MaskError, match="1 layers"):
        budgeted_masks(model, HeadScores([[1.0, 2.0]]), batch=inputs)


def test_frontier_finds_the_best_within_the_budget_and_resumes(tmp_path: Path) -> None:
    model, inputs = zoo.host("vit"), zoo.batch("vit", size=6)
    labels = torch.arange(6) % 5
    arguments = {"members": 2, "max_cost": 1.3, "up_to": 2.0, "progress": False, "folder": tmp_path}
    found = frontier(model, scores(0), [(inputs, labels)], inputs, **arguments)  # type: ignore[arg-type]
    chosen = found.chosen
    assert chosen is not None
    assert chosen.cost <= 1.3
    assert chosen.objective == min(p.objective for p in found.points if p.cost <= 1.3)
    # by gates it is what the fused ensemble answers
    logits = hydra.fuse(model, list(chosen.masks))(inputs).logits
    expected = torch.nn.functional.nll_loss(logits.detach(), labels)
    assert chosen.objective == pytest.approx(float(expected), abs=1e-5)
    objectives = [point.objective for point in found.best()]
    assert objectives == sorted(objectives, reverse=True)
    assert Frontier.from_json(tmp_path / "frontier.json") == found
    assert "<- chosen" in str(found)

    def never(masks: object) -> float:
        raise AssertionError("points in the file are not run again")

    again = frontier(model, scores(0), never, inputs, name="NLL", **arguments)  # type: ignore[arg-type]
    assert again == found
