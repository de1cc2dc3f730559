"""Heads and neurons within a budget: the count of the pruned model is what was promised."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch

from hydra_ensembles.costs import choose_units, cost
from hydra_ensembles.criteria import score_units
from hydra_ensembles.errors import MaskError
from hydra_ensembles.heads import HeadScores, UnitScores, prune_units_
from hydra_ensembles.hosts import host_model
from tests import zoo
from tests.hosts.test_shared_layers import albert


def ratio(model: torch.nn.Module, mask: object, batch: object) -> float:
    pruned = prune_units_(copy.deepcopy(model), mask)  # type: ignore[arg-type]
    return cost(pruned, batch).relative_to(cost(model, batch)).multiply_adds


@pytest.mark.parametrize("name", zoo.MAKERS)
@pytest.mark.parametrize("uniform", [False, True], ids=["best first", "uniform"])
def test_the_pruned_model_costs_what_was_allowed(name: str, uniform: bool) -> None:
    model, batch = zoo.host(name), zoo.batch(name)
    scores = score_units(model, None, criterion="random")
    mask = choose_units(model, scores, max_cost=0.7, batch=batch, uniform=uniform)
    counted = ratio(model, mask, batch)
    assert counted <= 0.7
    assert counted > (0.5 if uniform else 0.69), counted
    assert min(mask.heads.kept) >= 2
    counts = host_model(model).neuron_counts
    shares = zip(mask.neurons.kept, counts, strict=True)
    assert all(kept >= 0.1 * n for kept, n in shares)
    if uniform:
        assert len(set(mask.neurons.kept)) == 1 and len(set(mask.heads.kept)) == 1
    if name == "llama":  # two heads read one key head: they stay or go together
        assert all(
            row.view(-1, 2).sum(1).tolist() == [2 * int(a) for a in row[::2]] for row in mask.heads
        )


def test_the_best_score_for_each_multiply_add_comes_first() -> None:
    model, batch = zoo.host("vit"), zoo.batch("vit")
    scores = score_units(model, [batch])
    mask = choose_units(model, scores, max_cost=0.6, batch=batch, min_heads=0, min_neurons=0.0)
    dense = cost(model, batch).multiply_adds
    prices = {}
    for kind in ("heads", "neurons"):
        one = choose_units(model, scores, max_cost=1.0, batch=batch)
        getattr(one, kind)[1][0] = False
        prices[kind] = dense - cost(prune_units_(copy.deepcopy(model), one), batch).multiply_adds
    kept, left_out = [], []
    for kind, layer in itertools.product(prices, range(zoo.LAYERS)):
        rates = getattr(scores, kind)[layer] / prices[kind]
        row = getattr(mask, kind)[layer]
        if kind == "neurons":
            left_out += rates[~row].tolist()
            row[rates.argmax()] = False  # the best one of each layer stays in any case
        kept += rates[row].tolist()
    assert min(kept) > max(left_out)


def test_a_budget_that_cannot_be_met_says_what_the_least_costs() -> None:
    model, batch = zoo.host("bert"), zoo.batch("bert")
    scores = score_units(model, None, criterion="magnitude")
    for uniform in (False, True):
        with pytest.raises(MaskError, match=r"max_cost=0.05 cannot be met") as error:
            choose_units(model, scores, max_cost=0.05, batch=batch, uniform=uniform)
        found = re.search(r"it costs ([\d.]+) x", str(error.value))
        assert found is not None
        least = float(found.group(1))
        mask = choose_units(model, scores, max_cost=least + 1e-3, batch=batch, uniform=uniform)
        assert ratio(model, mask, batch) == pytest.approx(least, abs=1e-3)


def test_all_stays_where_all_fits_and_heads_stay_when_asked() -> None:
    model, batch = zoo.host("bert"), zoo.batch("bert")
    scores = score_units(model, None, criterion="magnitude")
    assert choose_units(model, scores, max_cost=1.0, batch=batch) == choose_units(
        model, scores, max_cost=1.0, batch=batch, uniform=True
    )
    mask = choose_units(model, scores, max_cost=0.8, batch=batch, uniform=True, heads=False)
    assert mask.heads.kept == (4, 4, 4) and len(set(mask.neurons.kept)) == 1
    assert ratio(model, mask, batch) <= 0.8


def test_scores_of_another_model_are_refused() -> None:
    model, batch = zoo.host("bert"), zoo.batch("bert")
    with pytest.raises(MaskError, match="1 layers but Bert"):
        choose_units(
            model, UnitScores(HeadScores([[1.0]]), HeadScores([[1.0]])), max_cost=1, batch=batch
        )
    other = UnitScores(HeadScores([[1.0] * 4] * 3), HeadScores([[1.0] * 7] * 3))
    with pytest.raises(MaskError, match="7 neurons in layer 0"):
        choose_units(model, other, max_cost=1, batch=batch)


def test_layers_that_share_weights_keep_all() -> None:
    model = albert()
    batch = {"input_ids": torch.arange(1, 13).view(2, 6)}
    scores = score_units(model, None, criterion="random")
    with pytest.raises(MaskError, match=r"it costs 1\.000 x"):
        choose_units(model, scores, max_cost=0.9, batch=batch)
