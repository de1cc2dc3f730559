"""`build` in one line: every method, within budget, recorded, resumed, replayed, the same again."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydra_ensembles.builder import METHODS, build, replay
from hydra_ensembles.costs.formula import cost
from hydra_ensembles.errors import DataError, FormatError, MaskError
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.methods import EnsembleObjective, Random, Select
from hydra_ensembles.uncertainty import NoveltyFit

from .. import zoo
from ..zoo import VOCABULARY, sharp


def pictures(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    x = torch.rand(count, 3, 16, 16, generator=generator) + labels[:, None, None, None] / 3
    return [(x[i : i + 15], labels[i : i + 15]) for i in range(0, count, 15)]


def sentences(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, 7), generator=generator)
    ids[:, 0] = 1
    mask = torch.ones_like(ids)
    mask[::3, 5:] = 0
    data = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.arange(count) % 3}
    return [{k: v[i : i + 15] for k, v in data.items()} for i in range(0, count, 15)]


def outliers(count=40):
    generator = torch.Generator().manual_seed(9)
    return [(torch.randn(count, 3, 16, 16, generator=generator),)]


def test_novelty_that_cannot_be_fitted_raises_or_warns():
    few = {"method": "random", "max_cost": None, "calibrate": False, "progress": False}
    with pytest.raises(DataError, match="10 known"):
        build(sharp("timm"), pictures(9), novelty=True, **few)
    with pytest.warns(UserWarning, match="10 known"):
        ensemble = build(sharp("timm"), pictures(9), **few)
    assert ensemble.novelty is None and "at least 10 known" in ensemble.record["novelty"]
    assert "novelty  not fitted: Novelty needs at least 10 known examples" in str(ensemble)
    assert build(sharp("timm"), pictures(9), novelty=False, **few).novelty is None


def test_terms_that_join_are_checked_on_given_outliers_and_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zoo.any_longer_sum(monkeypatch)
    added = []
    add = NoveltyFit.add_ood_
    monkeypatch.setattr(NoveltyFit, "add_ood_", lambda *a: added.append(a[1]) or add(*a))
    ensemble = build(
        sharp("timm"),
        pictures(120),
        method="parts",
        ood={"strange": outliers()},
        progress=False,
    )
    assert "checked on far outliers" in ensemble.record["novelty"]
    assert added[0] == "strange" and "mix proxies" in added


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_calibrated_ensemble_within_its_budget(method):
    model = sharp("timm")
    data = pictures()
    before = [p.clone() for p in model.parameters()]
    ensemble = build(
        model,
        data,
        ood={"gauss": outliers()},
        method=method,
        members=3,
        max_cost=1.6,
        progress=False,
    )
    assert ensemble.members == 3
    ratio = cost(ensemble, data[0]).relative_to(cost(model, data[0])).multiply_adds
    assert ensemble.record["cost"] == pytest.approx(ratio)
    assert ensemble.record["cost"] <= 1.6
    assert ensemble.temperature > 0 and len(ensemble.member_temperatures) == 3
    assert ensemble.score in ensemble.record["calibration"]["auroc_by_score"]
    json.dumps(ensemble.record)
    answer = ensemble.predict(data[0])
    assert answer.probabilities.shape == (15, 3) and bool(answer.uncertainty.isfinite().all())
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_text_with_proxies_only():
    model = sharp("bert").train()
    ensemble = build(model, sentences(), method="circuit", members=2, max_cost=1.3, progress=False)
    assert model.training and not any(module.training for module in ensemble.modules())
    assert ensemble.record["examples"] == {"select": 36, "stop": 12, "temperature": 12}
    data = ensemble.record["settings"]["data"]
    assert (
        any("proxy" in name for name in data) and ensemble.record["calibration"]["auroc_by_score"]
    )
    assert ensemble.record["cost"] <= 1.3


def test_the_same_again_and_replayed():
    model = sharp("timm")
    data = pictures()
    same = {"method": "select", "max_cost": 1.5, "progress": False}
    first, second = (build(model, data, **same) for _ in range(2))
    assert first.record == second.record
    again = replay(model, json.loads(json.dumps(first.record)))
    torch.testing.assert_close(
        again.predict(data[0]).uncertainty, first.predict(data[0]).uncertainty
    )
    with torch.no_grad():
        model.head.bias.add_(1.0)
    with pytest.raises(DataError, match="other weights"):
        replay(model, first.record)
    with pytest.raises(DataError, match="record"):
        replay(model, {})


def test_a_finished_search_is_not_repeated_and_a_changed_one_refused(tmp_path):
    model = sharp("timm")
    data = pictures()
    same = {"method": "select", "folder": tmp_path, "progress": False}
    first = build(model, data, max_cost=1.5, **same)
    again = build(model, data, max_cost=1.5, **same)
    assert first.record == again.record
    with pytest.raises(FormatError, match=r"max_cost was 1\.5"):
        build(model, data, max_cost=1.4, **same)


QUICK = {"method": "select", "score": "msp", "calibrate": False, "progress": False}
KILLED = """
import os, signal, sys
from tests.zoo import sharp
from tests.builder.test_building import QUICK, build, pictures
model, calls = sharp("timm"), 0
def count(*_):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
model.head.register_forward_hook(count)
build(model, pictures(), max_cost=1.5, folder=sys.argv[1], **QUICK)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_a_killed_search_of_members_ends_the_same_and_a_changed_one_is_refused(tmp_path):
    model, data, calls = sharp("timm"), pictures(), []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    whole = build(model, data, max_cost=1.5, **QUICK)
    moment = str(int(0.4 * len(calls)))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), moment], cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    kept = sorted((tmp_path / "candidates").glob("*.safetensors"))
    steps = json.loads((tmp_path / "build.json").read_text())["steps"]
    assert kept and not any("masks" in step for step in steps)
    arguments = {"max_cost": 1.5, "folder": tmp_path, **QUICK}
    with pytest.raises(FormatError, match="seed was 0, is 1"):
        build(model, data, seed=1, **arguments)
    with pytest.raises(FormatError, match="data has changed"):
        build(model, pictures(seed=1), **arguments)
    calibrated = Select(objective=EnsembleObjective(nll=1.0))
    with pytest.raises(FormatError, match="options"):
        build(model, data, **{**arguments, "method": calibrated})
    other = sharp("timm")
    with torch.no_grad():
        other.head.bias.add_(1.0)
    with pytest.raises(FormatError, match="weights have changed"):
        build(other, data, **arguments)
    before = len(calls)
    resumed = build(model, data, **arguments)
    assert len(calls) - before <= before - len(kept)  # what was kept was not run again
    assert resumed.record == whole.record
    assert not (tmp_path / "candidates").exists()


@pytest.mark.parametrize("members", [2, 4])
def test_members_made_one_by_one_stay_within_their_budget(members):
    model, data = sharp("timm"), pictures()
    for limit in (0.75, 1.2):  # the first allows one head each in the last block, the other two
        found = build(model, data, method="random", members=members, max_cost=limit, progress=False)
        assert found.record["cost"] <= limit


def test_switches():
    model = sharp("timm")
    data = pictures()
    plain = build(
        model, data, validation=pictures(seed=1), max_cost=1.5, score="energy", calibrate=False,
        progress=False,
    )  # fmt: skip
    assert plain.temperature is None and plain.member_temperatures is None
    assert plain.score == "energy"
    assert plain.record["examples"]["select"] == 60
    with pytest.raises(KeyError, match="method"):
        build(model, data, method="magic", progress=False)
    with pytest.raises(KeyError, match="msp"):
        build(model, data, score="mspp", progress=False)
    with pytest.raises(MaskError, match="no room"):
        build(model, data, max_cost=0.2, progress=False)


def test_random_members_keep_what_is_asked_in_branched_layers_only():
    model = sharp("timm")
    ensemble = build(model, pictures(), method=Random(keep=1), max_cost=None, progress=False)
    assert all(mask.kept[-1] == 1 for mask in ensemble.masks)
    assert len(HeadMask.full(model)) == len(ensemble.masks[0])


class Interrupted(Random):
    """A method that is stopped by Ctrl-C once its first member is kept."""

    name = "interrupted"

    def member(self, task, index, layers, keep):
        if index:
            raise KeyboardInterrupt
        return super().member(task, index, layers, keep)


def test_it_says_how_long_it_takes_and_what_it_keeps(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hydra_ensembles")
    model, data = sharp("timm"), pictures(30)
    build(model, data, method="taylor", members=2, max_cost=None, score="msp")
    assert any(
        line.startswith("Scoring heads for 2 members: about") and "one batch takes" in line
        for line in caplog.messages
    ), caplog.messages
    caplog.clear()
    with pytest.raises(KeyboardInterrupt):
        build(model, data, method=Interrupted(), max_cost=None, folder=tmp_path)
    assert f"Progress is saved in {tmp_path}" in caplog.text
    assert "member" in (tmp_path / "build.json").read_text()
    with pytest.raises(KeyboardInterrupt):
        build(model, data, method=Interrupted(), max_cost=None)
    assert "Nothing is kept: pass folder=" in caplog.text


@pytest.mark.parametrize("method", ["select", "auto"])
def test_heads_that_lose_unseen_outliers_are_not_taken(method, monkeypatch):
    from hydra_ensembles.search import detection

    model, data = sharp("timm"), pictures()
    settings = {"method": method, "max_cost": 1.6, "ood": outliers(), "progress": False}
    monkeypatch.setattr(detection, "TOLERANCE", -1000.0)  # nothing is good enough
    ensemble = build(model, data, **settings)
    full = HeadMask.full(model).tolist()
    assert ensemble.record["masks"] == [full] and ensemble.record["detection"]["heads"] == "host"
    assert "outliers Kept the host's own heads" in str(ensemble)
    assert "AUROC by MSP" in ensemble.record["calibration"]["traded"]["sentence"]
    asked = build(model, data, members=2, **settings)
    assert asked.members == 2 and "host's own heads" in asked.record["equal_members"]
    assert asked.predict(data[0]).labels == ensemble.predict(data[0]).labels
    monkeypatch.setattr(detection, "TOLERANCE", 1000.0)  # everything is
    taken = build(model, data, **settings).record
    if method == "select":
        assert taken["masks"] != [full]
    assert taken["detection"]["heads"] == "chosen"
    assert set(taken["detection"]["gains"]) > {"given 1/2", "given 2/2"}
    assert "detection" not in build(model, data, **{**settings, "ood": "auto"}).record
