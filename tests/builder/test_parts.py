"""Members as parts of one host, and `method="auto"`: exact, obedient, resumed, and said plainly."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles.builder import build, replay
from hydra_ensembles.data.batches import without_labels
from hydra_ensembles.errors import DataError, MaskError, UnsupportedModelError
from hydra_ensembles.evaluation.disagreement_check import check_disagreement
from hydra_ensembles.hosts import host_model
from hydra_ensembles.methods import Fold
from hydra_ensembles.refit.part_members import part_host, shares_of
from hydra_ensembles.refit.readout_states import Parting, Reader
from tests import zoo

from .test_building import pictures, sentences

FAMILIES = ["bert", "vit", "timm", "deit-teacher", "distilbert"]
LAST = {"bert": "bert.encoder.layer.2.output.dense", "timm": "blocks.2.mlp.fc2"}
QUICK: dict[str, Any] = {"max_cost": 1.5, "novelty": False, "progress": False}


def inputs(name: str, batches: int = 10) -> list[Any]:
    return [zoo.batch(name, 40, seed=seed) for seed in range(batches)]


def test_shares_are_disjoint_and_complete() -> None:
    for neurons, members in ((48, 5), (7, 7), (1536, 3)):
        shares = shares_of(neurons, members, seed=1)
        assert sorted(torch.cat(shares).tolist()) == list(range(neurons))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [share.tolist() for share in shares] != [
            share.tolist() for share in shares_of(neurons, members, seed=2)
        ] or neurons == members


@pytest.mark.parametrize("name", FAMILIES)
def test_members_follow_the_host_and_the_fused_model_is_its_members(name: str) -> None:
    model, batch = zoo.make(name), zoo.batch(name, 64, seed=99)
    found = part_host(host_model(model), inputs(name), members=3, progress=False)
    hydra.verify(found.ensemble, batch)
    members, own = found.ensemble.predict(batch).member_logits, zoo.run(model, batch)
    alone = torch.stack([zoo.run(found.ensemble.member(m), batch) for m in range(3)], 1)
    torch.testing.assert_close(members, alone, atol=1e-4, rtol=1e-4)
    assert float((members - own[:, None]).abs().amax((0, 2)).min()) > 1e-3  # each is another model
    assert all(0 < one.error < one.given_error for one in found.fits)


@pytest.mark.parametrize("name", ["bert", "timm"])
def test_refitted_members_are_nearer_to_the_hosts_states_on_new_data(name: str) -> None:
    model, batch = zoo.make(name), zoo.batch(name, 64, seed=99)
    host = host_model(model)
    found = part_host(host, inputs(name), members=3, progress=False)
    parting = Parting.of(host)
    states = Reader(model, parting)(batch)
    own = parting.linear(model)
    assert own.bias is not None
    for share, fitted in zip(found.shares, found.fits, strict=True):
        used = states.features[:, share]
        cut = used @ own.weight[share] + own.bias
        refitted = used @ fitted.linear.weight + fitted.linear.bias
        errors = [float((one - states.update).square().mean()) for one in (refitted, cut)]
        assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("name", ["bert", "timm"])
def test_a_member_reads_its_own_neurons_only_and_shares_the_rest(name: str) -> None:
    model = zoo.make(name)
    found = part_host(host_model(model), inputs(name), members=4, progress=False)
    for number, share in enumerate(found.shares):
        member = found.ensemble.member(number)
        weight = member.get_submodule(LAST[name]).weight
        assert isinstance(weight, Tensor)
        assert weight.abs().sum(0).nonzero().flatten().tolist() == share.tolist()
        state = model.state_dict()
        changed = [
            path for path, value in member.state_dict().items() if not value.equal(state[path])
        ]
        assert changed == [f"{LAST[name]}.weight", f"{LAST[name]}.bias"]


def test_build_makes_five_parts_and_they_are_saved(tmp_path: Path) -> None:
    model, data = zoo.sharp("bert"), sentences(120)
    ensemble = build(model, data, method="parts", progress=False)
    assert ensemble.members == 5 == len(ensemble.plan.ends)
    assert ensemble.record["settings"]["members"] == 5 and "masks" not in ensemble.record
    assert sum(ensemble.record["neurons"]) == 32 and len(ensemble.record["fits"]) == 5
    assert ensemble.record["cost"] <= 1.07 and ensemble.novelty is not None
    hydra.verify(ensemble, data[0])
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.member_logits(data[0]).equal(ensemble.member_logits(data[0]))
    with pytest.raises(DataError, match="from_pretrained"):
        replay(model, ensemble.record)
    two = build(model, data, method="parts", members=2, **QUICK)
    assert two.members == 2


def test_labels_do_not_matter_to_the_fit() -> None:
    model, data = zoo.sharp("timm"), pictures(60)
    host = host_model(model)
    first, second = (
        part_host(host, batches, members=3, progress=False)
        for batches in (data, [(x, labels.flip(0)) for x, labels in data])
    )
    for a, b in zip(first.fits, second.fits, strict=True):
        assert a.linear.weight.equal(b.linear.weight)


def test_what_cannot_be_parted_is_refused() -> None:
    def parted(name: str, members: int = 3) -> None:
        part_host(host_model(zoo.make(name)), inputs(name, 1), members=members, progress=False)

    for name, words in (("timm-unusual", "all tokens"), ("clip-classifier", "all tokens")):
        with pytest.raises(UnsupportedModelError, match=words + '.*method="select"'):
            parted(name)
    with pytest.raises(UnsupportedModelError, match=r"48 neurons.*50 members"):
        parted("bert", members=50)
    with pytest.raises(DataError, match="too few"):
        build(zoo.sharp("timm"), pictures(30), method="parts", **QUICK)
    with pytest.raises(MaskError, match=r"max_cost=0\.3"):
        build(zoo.sharp("timm"), pictures(60), method="parts", max_cost=0.3, progress=False)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_have_parts_at_their_last_token(name: str) -> None:
    data = sentences(240)
    found = part_host(host_model(zoo.sharp(name)), data, members=3, progress=False)
    hydra.verify(found.ensemble, data[0])
    assert all(one.error < one.given_error for one in found.fits)


# --- fold -----------------------------------------------------------------------------------------


def test_one_host_becomes_a_folded_ensemble_and_resumes(tmp_path: Path) -> None:
    model, data = zoo.sharp("bert"), sentences(120)
    before = [parameter.clone() for parameter in model.parameters()]
    way = Fold(epochs=1, learning_rate=1e-2)
    options: dict[str, Any] = {"method": way, "progress": False}
    ensemble = build(model, data, **options)
    assert ensemble.members == 3 and ensemble.temperature is not None
    assert "folded   from 3 hosts by 72 examples, trunk the mean" in str(ensemble)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    hydra.verify(ensemble, data[0])
    members = ensemble.predict(data[0]).member_logits
    assert float((members - zoo.run(model, without_labels(data[0]))[:, None]).abs().max()) > 1e-2
    with pytest.raises(DataError, match="from_pretrained"):
        replay(model, ensemble.record)
    first, second = (build(model, data, folder=tmp_path, **options) for _ in range(2))
    assert first.record == second.record
    assert first.member_logits(data[0]).equal(second.member_logits(data[0]))
    assert first.member_logits(data[0]).equal(ensemble.member_logits(data[0]))


# --- auto -----------------------------------------------------------------------------------------


def certain_host() -> tuple[torch.nn.Module, list[Any]]:
    """Return a host with balanced, confident answers, and data with these answers as labels."""
    model = zoo.make("timm")
    head: Any = model.head
    images = [zoo.batch("timm", 30, seed=seed) for seed in range(12)]
    with torch.no_grad():
        logits = torch.cat([zoo.run(model, batch) for batch in images])
        scale = 10 / logits.std(0)
        head.weight.mul_(scale[:, None])
        head.bias.mul_(scale).sub_(logits.mean(0) * scale)
    return model, [(batch, zoo.run(model, batch).argmax(-1)) for batch in images]


def test_auto_says_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydra_ensembles")
    ensemble = build(zoo.sharp("timm"), pictures(90), max_cost=1.5, novelty=False)
    found = ensemble.record["auto"]
    assert ensemble.record["settings"]["method"] == "auto"
    assert set(found["nll"]) == {"select", "parts", "one"}
    assert found["why"] in caplog.messages and f"chosen   {found['why']}" in str(ensemble)
    best = min(found["nll"], key=found["nll"].get)
    if found["chosen"] != best:  # within the interval heads win
        assert found["chosen"] == "select" and found["difference"][1] <= 0
    again = build(zoo.sharp("timm"), pictures(90), method="select", **QUICK)
    if found["chosen"] == "select":
        assert again.record["masks"] == ensemble.record["masks"]


def test_auto_leaves_heads_only_where_another_is_clearly_better() -> None:
    model, data = certain_host()
    ensemble = build(model, data, max_cost=1.0, novelty=False, progress=False)
    found = ensemble.record["auto"]
    assert found["chosen"] == "one" and found["difference"][1] > 0
    assert found["nll"]["one"] == min(found["nll"].values())
    assert "its NLL is lower than that of heads by" in found["why"]
    assert ensemble.members == 1
    again = replay(model, ensemble.record)
    assert again.predict(data[0]).uncertainty.equal(ensemble.predict(data[0]).uncertainty)


def test_an_explicit_number_of_members_is_obeyed() -> None:
    model, data = zoo.sharp("timm"), pictures(60)
    two = build(model, data, members=2, **QUICK)
    assert two.members == 2 and set(two.record["auto"]["nll"]) == {"select", "parts"}
    one = build(model, data, members=1, **QUICK)
    assert one.members == 1 and set(one.record["auto"]["nll"]) == {"select", "one"}
    assert "There is one member" in one.record["disagreement"]["sentence"]
    assert "alarm    There is one member: mutual information and disagreement are 0" in str(one)
    assert float(one.predict(data[0]).mutual_information.abs().max()) < 1e-6


def test_hosts_without_parts_have_heads_or_one_member() -> None:
    data = [zoo.batch("timm-unusual", 20, seed=seed) for seed in range(4)]
    labelled = [(x, torch.arange(20) % 5) for x in data]
    found = build(zoo.make("timm-unusual"), labelled, **QUICK).record["auto"]
    assert set(found["nll"]) == {"select", "one"}
    assert "all tokens" in found["refused"]["parts"] and "no members by parts" in found["why"]


KILLED = """
import os, signal, sys
from tests.zoo import sharp
from tests.builder.test_parts import QUICK, build, pictures
model, calls = sharp("timm"), 0
def count(*_):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
model.head.register_forward_hook(count)
build(model, pictures(), method=sys.argv[2], folder=sys.argv[1], **QUICK)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
@pytest.mark.parametrize("method", ["parts", "auto"])
def test_a_killed_build_ends_the_same(method: str, tmp_path: Path) -> None:
    model, data, calls = zoo.sharp("timm"), pictures(), []
    model.head.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    whole = build(model, data, method=method, **QUICK)
    runs = len(calls)
    for share in (0.4, 0.8):
        folder = tmp_path / str(share)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), method, str(int(share * runs))],
            cwd=Path(__file__).parents[2],
            env=dict(os.environ),
        )
        assert killed.returncode == -signal.SIGKILL
        resumed = build(model, data, method=method, folder=folder, **QUICK)
        assert resumed.record == whole.record
        assert resumed.member_logits(data[0]).equal(whole.member_logits(data[0]))
        finished = build(model, data, method=method, folder=folder, **QUICK)
        assert finished.record == whole.record


# --- disagreement as an alarm ---------------------------------------------------------------------


def columns(mutual_information: Tensor) -> dict[str, Tensor]:
    return {"mutual_information": mutual_information, "score:msp": mutual_information.flip(0)}


def test_disagreement_is_called_an_alarm_only_where_it_is_one() -> None:
    known, far = torch.rand(200, generator=torch.Generator().manual_seed(0)), torch.ones(50) * 0.9
    good = check_disagreement(
        {"id": columns(known), "ood/far": columns(far)}, members=3, score="msp"
    )
    assert good is not None and good["useful"]
    start = "Disagreement separates outliers from known data: AUROC 92.00 ["
    assert good["sentence"].startswith(start)
    both = {"id": columns(known), "ood/far": columns(far), "ood/near": columns(known[:60])}
    bad = check_disagreement(both, members=3, score="msp")
    assert bad is not None and not bad["useful"]
    assert bad["sentence"].startswith("Do not use disagreement as an alarm here: AUROC 92.00 [")
    assert "on near" in bad["sentence"]
    grouped = {"id": columns(known), "ood/proxies/a": columns(far), "ood/proxies/b": columns(far)}
    assert list(check_disagreement(grouped, members=3, score="msp")["auroc"]) == ["proxies"]  # type: ignore[index]
    assert check_disagreement({"id": columns(known)}, members=3, score="msp") is None
    assert check_disagreement(both, members=1, score="msp") is None


def test_build_and_evaluate_say_it() -> None:
    model, data = zoo.sharp("timm"), pictures(60)
    outliers = [(torch.randn(30, 3, 16, 16),)]
    ensemble = build(model, data, method="parts", ood={"noise": outliers}, **QUICK)
    found = ensemble.record["disagreement"]
    assert set(found["auroc"]) == {"outliers", "proxies"}
    assert f"alarm    {found['sentence']}" in str(ensemble)
    results = hydra.evaluate(ensemble, data, ood={"noise": outliers}, progress=False)
    assert results.settings["disagreement"]["sentence"] in repr(results)
    plain = hydra.evaluate(model, data, ood={"noise": outliers}, progress=False)
    assert "disagreement" not in plain.settings
