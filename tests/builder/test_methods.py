"""Methods of `build`: members differ, or the record says why not; options belong to a method."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles import HeadMask, HeadScores
from hydra_ensembles.builder import METHODS, build
from hydra_ensembles.builder.methods import as_method, method_with
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.methods import Random, Select
from hydra_ensembles.search.selection import count_masks, next_best

from ..zoo import sharp
from .test_building import pictures


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"parts", "fold", "auto"}))
def test_members_differ_where_they_can(method):
    # four members of which each keeps one of few heads: by score alone some would be equal
    model = sharp("timm")
    ensemble = build(
        model, pictures(30), method=method, members=4, max_cost=None, score="msp", progress=False
    )
    assert len(set(ensemble.masks)) == 4 == len(ensemble.plan.ends)
    assert "equal_members" not in ensemble.record
    assert str(ensemble).splitlines()[0].endswith("4 members")


@pytest.mark.parametrize("method", ["circuit", "taylor", "hies", "random"])
def test_equal_members_are_told_where_masks_run_out(method):
    model = sharp("timm")
    heads = HeadMask.full(model).shape
    way = method_with(method, keep=[n if i else 1 for i, n in enumerate(heads)])
    members = heads[0] + 1  # one head of the first block: there are as many masks as heads
    ensemble = build(
        model, pictures(30), method=way, members=members, max_cost=None, score="msp", progress=False
    )
    assert len(set(ensemble.masks)) == heads[0]
    first = str(ensemble).splitlines()[0]
    assert f"{members} members, {heads[0]} distinct: only {heads[0]} masks keep 1" in first


def test_selected_members_are_equal_only_where_the_budget_forces_it(monkeypatch):
    # a budget that has room for two streams only
    monkeypatch.setattr(Budget, "allows", lambda self, masks: len(set(masks)) <= 2)
    ensemble = build(sharp("timm"), pictures(30), method="select", max_cost=1.6, progress=False)
    assert len(set(ensemble.masks)) == 2
    assert "max_cost=1.6" in ensemble.record["equal_members"]
    assert "3 members, 2 distinct: no ensemble of 3 different masks" in str(ensemble)


def test_the_next_best_gives_up_least():
    scores = HeadScores([[3.0, 1.0, 0.9, 0.1], [2.0, 1.9]])
    mask = scores.top_k([2, 1])
    taken: list[HeadMask] = []
    values = []
    while (found := next_best(scores, mask, [0, 1], taken)) is not None:
        taken.append(found)
        values.append(sum(float(row[kept].sum()) for row, kept in zip(scores, found, strict=True)))
    assert taken[0] == mask and len(set(taken)) == len(taken) == 12
    assert count_masks((4, 2), (2, 1), [0, 1]) == 12
    assert torch.tensor(values).diff().max() <= 1e-6  # never a better one after a worse one


def test_a_method_is_a_name_or_a_config_object():
    assert as_method("random") == Random() and as_method(Random(keep=2)).keep == 2
    assert method_with("taylor", keep=0.5).settings() == {"keep": 0.5}
    with pytest.raises(ValueError, match="no option 'keep'"):
        method_with("select", keep=0.5)
    with pytest.raises(TypeError, match="config object"):
        as_method(Select)
    with pytest.raises(KeyError, match="Did you mean 'select'"):
        as_method("selct")
