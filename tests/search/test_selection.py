"""Selection finds members that help each other, within a budget, and is not fooled by noise."""

from __future__ import annotations

import itertools

import pytest
import torch

from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.errors import FormatError, MaskError
from hydra_ensembles.heads.head_mask import HeadMask, HeadScores
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.candidate_table import Table, joined
from hydra_ensembles.search.halving import halve
from hydra_ensembles.search.mask_pool import all_rows, make_pool
from hydra_ensembles.search.search_state import SearchState, TensorStore
from hydra_ensembles.search.selection import EnsembleObjective, Selector, select_members
from hydra_ensembles.search.trunk_cache import Outputs, Prefix
from hydra_ensembles.uncertainty import score_logits

from ..zoo import images, sharp


def outputs(candidates=6, examples=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (examples,), generator=generator)
    truth = 2 * torch.nn.functional.one_hot(labels, 4)[:, None]
    own = truth + torch.randn(examples, candidates, 4, generator=generator)
    other = {f"ood/{f}": torch.randn(100, candidates, 4, generator=generator) * 1.2 for f in "ab"}
    return Outputs({"id": own, **other}, {"id": labels})


def test_figures_are_those_of_the_ensemble():
    from sklearn.metrics import log_loss, roc_auc_score

    out = outputs()
    table = Table(out)
    members = [1, 4, 4]
    names = ("msp", "energy", "entropy", "mutual-information", "max-logit")
    found = table.figures(members, scores=names)
    logits = {k: v[:, members] for k, v in out.logits.items()}
    mean = logits["id"].double().softmax(-1).mean(1)
    assert found.nll == pytest.approx(log_loss(out.labels["id"], mean), abs=1e-5)
    for name in names:
        own, other = (score_logits(logits[k], name) for k in ("id", "ood/a"))
        truth = [0] * len(own) + [1] * len(other)
        expected = roc_auc_score(truth, torch.cat([own, other]))
        assert found.auroc["ood/a"][name] == pytest.approx(expected, abs=1e-6)


def test_all_additions_at_once_equal_one_by_one():
    table = Table(outputs(7))
    scores = ("msp", "energy")
    for have in ([], [2], [2, 5]):
        many = table.grown(have, range(7), scores=scores)
        for new, found in enumerate(many):
            one = table.figures([*have, new], scores=scores)
            assert found.nll == pytest.approx(one.nll, abs=1e-6)
            assert found.accuracy == one.accuracy
            for family, by in one.auroc.items():
                assert found.auroc[family] == pytest.approx(by, abs=1e-4)


def test_a_beam_over_all_candidates_finds_the_best_pair():
    selector = Selector(Table(outputs(8)))
    best = max(itertools.combinations(range(8), 2), key=selector.gain)
    assert selector.gain(selector.forward(2, beam=8)[0]) == pytest.approx(selector.gain(best))


def test_members_differ_unless_the_budget_forces_them_to_be_equal():
    # candidate 3 is so good that selection with replacement would take it three times
    out = outputs(6)
    truth = torch.nn.functional.one_hot(out.labels["id"], 4)
    out.logits["id"][:, 3] = 3.0 * truth + torch.randn(200, 4, generator=torch.manual_seed(0)) / 3
    free = Selector(Table(out))
    assert free.gain((3, 3, 3)) > free.gain(free.forward(3)[0])
    assert all(len(set(found)) == 3 for found in free.forward(3, beam=4))
    tight = Selector(Table(out), fits=lambda members: len(set(members)) <= 2)
    found = tight.forward(3, beam=4)
    assert found and all(len(set(ensemble)) == 2 for ensemble in found)
    chosen = free.choose([(3, 3, 3), (1, 2, 4)])
    assert chosen.members == (1, 2, 4)


def test_the_objective_asks_for_mean_worst_and_likelihood():
    table = Table(outputs())
    host = table.figures([0], scores=("msp",))
    mine = table.figures([1, 2, 3], scores=("msp",))
    off = {"nll": 0.0, "nll_gain": 0.0, "accuracy": 0.0, "scores": ("msp",)}
    closed = {
        family: 100 * (mine.auroc[family]["msp"] - by["msp"]) / (1 - by["msp"])
        for family, by in host.auroc.items()
    }
    mean, worst = sum(closed.values()) / 2, min(closed.values())
    assert EnsembleObjective(worst=0.0, **off).value(mine, host) == pytest.approx(mean)
    assert EnsembleObjective(**off).value(mine, host) == pytest.approx(mean + worst)
    dear = EnsembleObjective(**{**off, "nll": 3.0})
    rise = [max(0.0, 100 * (a / b - 1)) for a, b in ((host.nll, mine.nll),)]
    back = table.figures([1, 2, 3], scores=("msp",))
    assert dear.value(host, back) <= EnsembleObjective(**off).value(host, back) - 3 * rise[0] + 1e-6
    same = table.figures([0], scores=("msp", "energy"))
    assert EnsembleObjective().value(same, same) == 0


def test_pools_are_exhaustive_for_few_heads_and_bounded_for_many():
    host = host_model(sharp("timm"))
    pool = make_pool(host, [0, 1], size=100)
    assert len(pool) == 49 and next(iter(pool)) == HeadMask.full(host)
    assert len(all_rows(3)) == 7 and bool(all_rows(3)[0].all())
    wide = host_model(sharp("bert"))
    table = HeadScores([[4.0, 3.0, 2.0, 1.0]] * 3)
    pool = make_pool(wide, [1, 2], size=40, tables={"taylor": table}, seed=0)
    assert len(pool) == 40 and {"host", "taylor", "random"} == set(pool.values())
    assert all(bool(mask[0].all()) and all(mask.kept) for mask in pool)
    assert pool == make_pool(wide, [1, 2], size=40, tables={"taylor": table}, seed=0)


def test_budgets_choose_layers_and_heads():
    host = host_model(sharp("timm"))
    batch = images(2)
    assert Budget.of(host, batch, None).branch_layers(3) == [1]
    assert Budget.of(host, batch, 3.0).branch_layers(2) == [0, 1]
    with pytest.raises(MaskError, match="no room"):
        Budget.of(host, batch, 0.1).branch_layers(3)


class Stopped(Exception):
    pass


def a_search(folder=None, stop=None, members=3, max_cost=1.5):
    """Select members of a small host; stop after some block runs. Return them, and the runs."""
    from ..builder.test_building import sentences

    host = host_model(sharp("bert"))
    data = sentences(30)
    odd = [{k: v.flip(1) for k, v in b.items() if k != "labels"} for b in data]
    sets = {"first:id": data[:1], "rest:id": data[1:], "rest:ood/flip": odd}
    prefix = Prefix(host, sets, labelled=["first:id", "rest:id"])
    prefix.advance(torch.ones(4, dtype=torch.bool))
    runs = 0

    def tick(_):
        nonlocal runs
        runs += 1
        if runs == stop:
            raise Stopped

    state = SearchState(folder, {"seed": 3})
    store = None if folder is None else TensorStore(folder / "candidates")
    pool = make_pool(host, [1, 2], size=30)
    objective = EnsembleObjective()
    left = halve(
        prefix, pool, ["first"], objective=objective, members=members, state=state, tick=tick
    )
    found = prefix.logits(list(left), tick=tick, store=store)
    table = Table(Outputs(joined(found.logits), joined(found.labels)))
    budget = Budget.of(host, data[0], max_cost)
    rows = {"id": torch.arange(20), "ood/flip": torch.arange(20)}
    hold = {name: torch.arange(20, 30) for name in rows}
    chosen = select_members(
        table, list(left), budget, members=members, select=rows, hold=hold, seed=3
    )
    return chosen, [list(left)[i] for i in chosen.members], budget, runs


def test_selection_stays_within_the_budget_and_reports_intervals():
    chosen, masks, budget, _ = a_search(max_cost=1.4)
    assert budget.ratio(masks) <= 1.4 and len(masks) == 3
    assert chosen.held_out >= 0  # the unpruned host is among the finalists
    low, high = chosen.intervals["AUROC ood/flip"]
    assert low <= high


def test_a_search_stopped_anywhere_ends_the_same(tmp_path):
    *whole, _, runs = a_search()
    rungs = set()
    for part in (0.1, 0.4, 0.7, 0.95):
        folder = tmp_path / str(part)
        with pytest.raises(Stopped):
            a_search(folder, stop=int(part * runs))
        rungs.add(len(SearchState(folder, {"seed": 3}).find("rung")))
        again, once_more = (a_search(folder)[:2] for _ in range(2))
        assert list(again) == list(once_more) == whole
    assert len(list((folder / "candidates").glob("*"))) > 0
    assert rungs == {0, 1}, "no stop came before, or none after a rung"


def test_damaged_logits_are_refused(tmp_path):
    store = TensorStore(tmp_path)
    value = torch.randn(3, 2)
    store.put("a", value)
    assert torch.equal(store.get("a"), value) and store.get("b") is None
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(FormatError, match="Delete it"):
        store.get("a")
    store.clear()
    assert not tmp_path.exists()
