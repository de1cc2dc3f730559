"""Members by logits and students: features @ W + b, wherever an ensemble goes."""

from __future__ import annotations

import copy
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.errors import FormatError, HydraError, UnsupportedModelError
from hydra_ensembles.fusion.linear_readout import LinearReadout, Readouts
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts.block import last_linear
from hydra_ensembles.hosts.host import host_model
from hydra_ensembles.hosts.probes import Pooling, find_pooling
from hydra_ensembles.training import average_weights
from tests import zoo
from tests.refit.test_folding import answers, data, perturbed, trio

HOSTS = ["bert", "vit", "timm", "deit-teacher", "timm-unusual", "clip-classifier", "llama"]
POOLING = {
    "timm-unusual": Pooling(0, 3),  # a class token and two registers are not averaged
    "clip-classifier": Pooling(0, 1),
    "dinov2": Pooling(1, 1),  # a class token beside the mean
}


def decoder_batch(size: int, seed: int = 1) -> dict[str, Tensor]:
    """Return texts of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, zoo.VOCABULARY, (size, 7), generator=generator)
    lengths = torch.tensor([7 - (i * 2) % 5 for i in range(size)])
    mask = (torch.arange(7) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batch_of(name: str, size: int = 8, seed: int = 99) -> Any:
    return decoder_batch(size, seed) if name == "llama" else zoo.batch(name, size, seed=seed)


@cache
def hosts_of(name: str) -> tuple[nn.Module, ...]:
    if name != "llama":
        return trio(name)
    return tuple(perturbed(zoo.sharp("llama"), seed) for seed in range(3))


def inputs_of(name: str) -> list[Any]:
    return data(name) if name != "llama" else [decoder_batch(40, seed) for seed in range(10)]


@cache
def folded(name: str) -> hydra.HydraEnsemble:
    """Return members by logits and a student; above a mean of all tokens they cost a bit more."""
    options = {"readout": "logits", "student": True, "max_cost": 1.02, "progress": False}
    return hydra.fold(hosts_of(name), inputs_of(name), **options)


def features_by_hand(model: nn.Module, name: str, batch: Any) -> Tensor:
    """Return [u, a] at the readout of a plain host, by hooks of our own."""
    view = host_model(model)
    block, seen = view.blocks[-1], {}
    path = last_linear(block)
    assert path is not None and block.norm2 is not None
    parts = {"u": block.module.get_submodule(path), "a": block.norm2}
    if view.family.norm == "post":
        parts["a"] = block.module.get_submodule(block.mlp_names[0])
    handles = [
        part.register_forward_pre_hook(lambda m, x, key=key: seen.update({key: x[0]}))
        for key, part in parts.items()
    ]
    zoo.run(model, batch)
    for handle in handles:
        handle.remove()
    states = torch.cat([seen["u"], seen["a"]], -1)
    if name == "llama":
        last = batch["attention_mask"].sum(1) - 1
        return states[torch.arange(len(last)), last]
    if name in POOLING:
        mean = states[:, POOLING[name].start :].mean(1)
        return torch.cat([states[:, : POOLING[name].own].flatten(1), mean], 1)
    return states[:, : 2 if name == "deit-teacher" else 1].flatten(1)


def given_readouts(name: str, engine: Any) -> hydra.HydraEnsemble:
    """Return a host with random readouts, run by one of the engines."""
    host = hosts_of(name)[0] if name != "dinov2" else zoo.host("dinov2")
    view = host_model(host)
    second = last_linear(view.blocks[-1])
    assert second is not None
    masks, last = [HeadMask.full(host)] * 3, len(view) - 1
    ensemble = hydra.fuse(host, masks, branch_layer=last, engine=engine)
    size = features_by_hand(host, name, batch_of(name, 2)).shape[1]
    generator = torch.Generator().manual_seed(0)
    classes = 3 if name == "llama" else 5

    def random(outputs: int) -> LinearReadout:
        weight = torch.randn(outputs, classes, size, generator=generator) / size**0.5
        return LinearReadout.of(weight, torch.randn(outputs, classes, generator=generator))

    readouts = Readouts(second, members=random(3), student=random(1), pooling=POOLING.get(name))
    return ensemble.attach_readouts_(readouts)


def linear(readout: LinearReadout | None, features: Tensor) -> Tensor:
    assert readout is not None
    return torch.einsum("bf,ocf->boc", features, readout.weight) + readout.bias


@pytest.mark.parametrize("engine", ["fused", "host"])
@pytest.mark.parametrize("name", [*HOSTS, "distilbert", "dinov2", "zero-shot-clip"])
def test_readouts_are_features_times_weights(name: str, engine: Any) -> None:
    ensemble, batch = given_readouts(name, engine), batch_of(name)
    assert ensemble.engine == engine
    host = hosts_of(name)[0] if name != "dinov2" else zoo.host("dinov2")
    features = features_by_hand(host, name, batch)
    answer = ensemble.predict(batch)
    close = {"atol": 1e-4, "rtol": 1e-4}
    expected = linear(ensemble.member_readout, features)
    torch.testing.assert_close(answer.member_logits, expected, **close)
    student = linear(ensemble.student, features)[:, 0]
    torch.testing.assert_close(answer.student_logits, student, **close)
    torch.testing.assert_close(answer.probabilities, student.softmax(-1), **close)
    hydra.verify(ensemble, batch)
    assert hydra.cost(ensemble, batch).multiply_adds > 0


@pytest.mark.parametrize("name", HOSTS)
def test_members_by_logits_and_a_student_follow_their_hosts(name: str, tmp_path: Path) -> None:
    ensemble, batch = folded(name), batch_of(name)
    hydra.verify(ensemble, batch)
    trunk = average_weights(hosts_of(name)).eval()
    features = features_by_hand(trunk, name, batch)
    answer = ensemble.predict(batch)
    expected = linear(ensemble.member_readout, features)
    torch.testing.assert_close(answer.member_logits, expected, atol=1e-3, rtol=1e-3)
    theirs = answers(hosts_of(name), batch).softmax(-1)  # logits may differ by a constant
    apart = float((answer.member_logits.softmax(-1) - theirs).square().mean())
    soup = zoo.run(trunk, batch).softmax(-1)[:, None]
    assert apart < 1.1 * float((soup - theirs).square().mean())
    assert ensemble.record["readout"] == "logits" and ensemble.record["student"]
    needed = hydra.cost(ensemble, batch).relative_to(hydra.cost(trunk, batch)).multiply_adds
    assert needed < (1.02 if name in POOLING else 1.0)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    again = loaded.predict(batch)
    assert again.member_logits.equal(answer.member_logits)
    assert again.student_logits.equal(answer.student_logits)
    hydra.verify(loaded, batch)
    assert str(loaded) == str(ensemble) and "a student answers" in str(loaded)


@pytest.mark.parametrize("name", ["bert", "llama", "timm-unusual"])
@pytest.mark.parametrize("readout", ["states", "logits"])
def test_the_onnx_export_and_int8_agree(name: str, readout: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from hydra_ensembles.runtime import load as load_exported

    options = {"readout": readout, "student": True, "max_cost": 2.0, "progress": False}
    ensemble = hydra.fold(hosts_of(name), inputs_of(name), **options)
    ensemble.temperature, ensemble.member_temperatures = 1.5, [0.8, 1.0, 1.2]
    batch = batch_of(name, 5)
    ensemble.fit_novelty_(inputs_of(name), progress=False)
    ensemble.export(tmp_path, example=batch, int8=True, known=inputs_of(name))
    inputs = batch if isinstance(batch, dict) else {"pixel_values": batch}
    arrays = {key: value.numpy() for key, value in inputs.items()}
    answer, expected = load_exported(tmp_path).predict(arrays), ensemble.predict(batch)
    for key in ("probabilities", "student_logits", "member_logits", "mutual_information"):
        ours = torch.as_tensor(getattr(answer, key))
        torch.testing.assert_close(ours, getattr(expected, key), atol=1e-4, rtol=1e-4)
    ours = torch.as_tensor(answer.logits).float()
    torch.testing.assert_close(ours, expected.logits, atol=1e-4, rtol=1e-4)
    small = load_exported(tmp_path, program="int8").predict(arrays)
    for key in ("student_logits", "member_logits"):
        ours, theirs = torch.as_tensor(getattr(small, key)), getattr(expected, key)
        assert 1e-5 < float((ours - theirs).norm() / theirs.norm()) < 0.1, key
    ours = torch.as_tensor(small.probabilities)
    torch.testing.assert_close(ours, expected.probabilities, atol=0.05, rtol=0)


def labelled(name: str, hosts: Any, seeds: range) -> list[Any]:
    """Return batches with labels drawn from the hosts' mean probability."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for seed in seeds:
        batch = batch_of(name, 40, seed)
        chances = answers(hosts, batch).softmax(-1).mean(1)
        labels = torch.multinomial(chances, 1, generator=generator)[:, 0]
        result.append({**batch, "labels": labels} if isinstance(batch, dict) else (batch, labels))
    return result


@pytest.mark.parametrize("readout", ["states", "logits"])
def test_evaluate_and_predict_agree(readout: Any) -> None:
    hosts = hosts_of("bert")
    held, test = labelled("bert", hosts, range(50, 55)), labelled("bert", hosts, range(60, 65))
    options = {"readout": readout, "student": True, "held_out": held, "progress": False}
    ensemble = hydra.fold(hosts, inputs_of("bert"), **options)
    assert ensemble.temperature is not None and ensemble.member_temperatures is not None
    batch = {key: torch.cat([one[key] for one in test]) for key in test[0]}
    answer, labels = ensemble.predict(batch), batch["labels"]
    chosen = answer.probabilities.gather(1, labels[:, None])[:, 0]
    scores = ("msp", "mutual-information", "max-logit")
    results = hydra.evaluate(ensemble, test, score=scores, bootstrap=0, progress=False)
    assert results["cls/NLL"] == pytest.approx(float(-chosen.log().mean()), rel=1e-4)
    right = (answer.class_index == labels).double().mean()
    assert results["cls/Acc"] == pytest.approx(float(right))
    columns = results.examples["id"]
    for key, score in (("score:msp", "msp"), ("score:mutual-information", "mutual-information")):
        ensemble.score = score
        found = ensemble.predict(batch).uncertainty.double()
        torch.testing.assert_close(columns[key], found, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(
        columns["mutual_information"], answer.mutual_information.double(), atol=1e-5, rtol=1e-3
    )
    logits, _ = collect_logits(ensemble, test)
    torch.testing.assert_close(logits[:, 0], answer.student_logits)
    output = ensemble(**batch)
    torch.testing.assert_close(output.logits, answer.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.loss, -chosen.log().mean(), atol=1e-5, rtol=1e-4)
    more = labelled("bert", hosts, range(70, 80))
    hydra.fit_policy(ensemble, more, risk=0.6, alarm=None, progress=False)
    assert ensemble.predict(batch).code is not None


def test_a_student_leaves_the_members_as_they_are() -> None:
    hosts, batch = hosts_of("vit"), batch_of("vit")
    held = labelled("vit", hosts, range(50, 55))
    options = {"held_out": held, "progress": False}
    alone = hydra.fold(hosts, inputs_of("vit"), student=False, **options)
    both = hydra.fold(hosts, inputs_of("vit"), student=True, **options)
    ours, theirs = both.predict(batch), alone.predict(batch)
    torch.testing.assert_close(ours.member_logits, theirs.member_logits)
    torch.testing.assert_close(ours.mutual_information, theirs.mutual_information)
    assert not ours.probabilities.allclose(theirs.probabilities, atol=1e-3)
    assert theirs.student_logits is None and "answered by a student" in repr(ours)
    for number in range(3):
        assert zoo.run(both.member(number), batch).shape == (8, 5)
    looped = copy.deepcopy(both)
    looped.mode = "loop"
    again = looped.predict(batch)
    torch.testing.assert_close(again.student_logits, ours.student_logits)
    torch.testing.assert_close(again.member_logits, ours.member_logits, atol=1e-4, rtol=1e-4)


def test_auto_is_chosen_on_held_out_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    hosts = hosts_of("vit")
    held = labelled("vit", hosts, range(50, 65))
    ensemble = hydra.fold(hosts, inputs_of("vit"), trunk="auto", held_out=held)
    ways = ensemble.record["choice"]
    assert [way["trunk"] for way in ways] == ["mean", "mean", 0, 0, 1, 1, 2, 2]
    best = min(way["NLL"] for way in ways)
    (chosen,) = [
        way
        for way in ways
        if way["trunk"] == ensemble.record["trunk"] and way["student"] == ensemble.record["student"]
    ]
    assert chosen["NLL"] <= best + 0.05 and "Chosen by held-out NLL" in caplog.text
    assert (ensemble.student is not None) == chosen["student"]
    hydra.verify(ensemble, batch_of("vit"))
    plain = hydra.fold(hosts, inputs_of("vit"), trunk="auto", student="auto")
    assert plain.student is None and plain.temperature is None and plain.record["trunk"] == "mean"
    assert "the trunk is the mean and there is no student" in caplog.text


def test_what_answers_is_what_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_ensembles.refit import fold_members

    hosts, held = hosts_of("vit"), labelled("vit", hosts_of("vit"), range(50, 55))
    monkeypatch.setattr(fold_members, "choose", lambda nll: ("mean", False))
    auto, members, student = (
        hydra.fold(hosts, inputs_of("vit"), student=which, held_out=held, progress=False)  # type: ignore[arg-type]
        for which in ("auto", False, True)
    )
    assert auto.student is None and auto.temperature is not None
    assert auto.temperature == members.temperature != student.temperature
    assert auto.member_temperatures == members.member_temperatures
    batch = batch_of("vit")
    assert auto.predict(batch).probabilities.equal(members.predict(batch).probabilities)


def test_a_better_student_is_chosen_and_ties_go_to_the_members() -> None:
    from hydra_ensembles.refit.fold_choice import choose

    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(400, generator=generator)
    simple, other = ("mean", False), ("mean", True)
    assert choose({simple: noise + 0.5, other: noise}) == other
    jitter = 0.3 * torch.randn(400, generator=generator)
    assert choose({simple: noise + 0.001, other: noise + jitter - jitter.mean()}) == simple
    assert choose({simple: noise, other: noise}) == simple


def test_decoders_fold_by_states(tmp_path: Path) -> None:
    hosts, batch = hosts_of("llama"), batch_of("llama")
    ensemble = hydra.fold(hosts, inputs_of("llama"), progress=False)
    hydra.verify(ensemble, batch)
    ours, theirs = ensemble.predict(batch).member_logits, answers(hosts, batch)
    soup = zoo.run(average_weights(hosts), batch)[:, None]
    assert float((ours - theirs).square().mean()) < float((soup - theirs).square().mean())
    member = ensemble.member(1)
    assert member.score.weight.equal(hosts[1].score.weight)  # type: ignore[union-attr]
    torch.testing.assert_close(zoo.run(member, batch), ours[:, 1], atol=1e-4, rtol=1e-4)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.predict(batch).member_logits.equal(ours)
    needed = hydra.cost(ensemble, batch).relative_to(hydra.cost(hosts[0], batch))
    assert needed.multiply_adds < 1.0


def test_hosts_that_average_tokens_fold_by_states_within_the_budget() -> None:
    hosts, batch = hosts_of("timm-unusual"), batch_of("timm-unusual")
    with pytest.raises(HydraError, match=r"needs 1\.\d+ x.*readout=\"logits\""):
        hydra.fold(hosts, inputs_of("timm-unusual"), progress=False)
    ensemble = hydra.fold(hosts, inputs_of("timm-unusual"), max_cost=2.0, progress=False)
    hydra.verify(ensemble, batch)
    ours, theirs = ensemble.predict(batch).member_logits, answers(hosts, batch)
    soup = zoo.run(average_weights(hosts), batch)[:, None]
    assert float((ours - theirs).square().mean()) < float((soup - theirs).square().mean())
    with pytest.raises(HydraError, match=r"max_cost=0\.3 cannot be met"):
        hydra.fold(hosts_of("vit"), inputs_of("vit"), max_cost=0.3, progress=False)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(HydraError, match="above 0"):
            hydra.fold(hosts_of("vit"), inputs_of("vit"), max_cost=wrong, progress=False)


def test_members_by_logits_are_not_hosts() -> None:
    ensemble = folded("bert")
    with pytest.raises(UnsupportedModelError, match=r"linear readouts.*states"):
        ensemble.member(0)
    looped = copy.deepcopy(ensemble)
    looped.mode = "loop"
    with pytest.raises(UnsupportedModelError, match="linear readouts"):
        looped.predict(batch_of("bert"))


def test_wrong_options_are_refused() -> None:
    for options, words in [
        ({"readout": "tokens"}, "tokens"),
        ({"student": "yes"}, "student"),
        ({"trunk": "best"}, "trunk"),
    ]:
        with pytest.raises(HydraError, match=words):
            hydra.fold(hosts_of("vit"), inputs_of("vit"), progress=False, **options)


def test_token_classifiers_are_refused() -> None:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    host = BertForTokenClassification(BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5)).eval()
    with pytest.raises(UnsupportedModelError, match="one answer per input"):
        hydra.fold([host, perturbed(host, 0)], data("bert"), readout="logits", progress=False)


def test_other_precisions_and_copies() -> None:
    ensemble, batch = folded("vit"), batch_of("vit")
    expected = ensemble.predict(batch)
    wide = copy.deepcopy(ensemble).double()
    assert wide.student is not None and wide.student.weight.dtype == torch.float64
    ours = wide.predict(batch.double())
    torch.testing.assert_close(ours.student_logits, expected.student_logits, atol=1e-3, rtol=1e-3)
    half = copy.deepcopy(ensemble).bfloat16().predict(batch.bfloat16())
    assert half.student_logits is not None and bool(half.student_logits.isfinite().all())
    training = copy.deepcopy(ensemble).train()
    again = training.predict(batch)
    torch.testing.assert_close(again.student_logits, expected.student_logits)


def test_threads_do_not_mix_their_features() -> None:
    ensemble = folded("vit")
    batches = [batch_of("vit", size, seed=size) for size in (1, 2, 3, 5, 7, 11)]
    expected = [ensemble.predict(batch).student_logits for batch in batches]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            found = ensemble.predict(batches[number]).student_logits
            if not found.allclose(expected[number], atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_damaged_record_of_readouts_is_refused(tmp_path: Path) -> None:
    import json

    from hydra_ensembles._records import sealed
    from hydra_ensembles.fusion.folder_schema import DIGEST

    folded("vit").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes: list[dict[str, Any]] = [{"members": 2}, {"features": 7}, {"student": False}]
    for change in [*changes, {"second": "nowhere"}, {"classes": 10**6, "features": 10**6}]:
        broken = {k: v for k, v in config.items() if k != DIGEST}
        broken["readouts"] = {**config["readouts"], **change}
        (tmp_path / "config.json").write_text(json.dumps(sealed(broken, DIGEST)))
        with pytest.raises(FormatError):
            hydra.HydraEnsemble.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", sorted(POOLING))
def test_the_tokens_that_a_host_averages_are_probed(name: str) -> None:
    assert find_pooling(host_model(zoo.host(name))) == POOLING[name]


@pytest.mark.parametrize("readout", ["states", "logits"])
def test_a_budget_below_one_host_prunes_the_trunk_first(readout: Any, tmp_path: Path) -> None:
    hosts, batch = hosts_of("vit"), batch_of("vit")
    options: dict[str, Any] = {"readout": readout, "student": True, "progress": False}
    ensemble = hydra.fold(hosts, inputs_of("vit"), max_cost=0.7, **options)
    needed = hydra.cost(ensemble, batch).relative_to(hydra.cost(hosts[0], batch)).multiply_adds
    assert 0.65 < needed <= 0.7  # what folding saves by itself is not pruned
    assert ensemble.record["cost"] == needed and ensemble.record["trunk's cost"] < 1
    hydra.verify(ensemble, batch)
    answer = ensemble.predict(batch)
    ensemble.save_pretrained(tmp_path)
    again = hydra.HydraEnsemble.from_pretrained(tmp_path).predict(batch)
    assert again.member_logits.equal(answer.member_logits)
    assert again.student_logits.equal(answer.student_logits)


@pytest.mark.parametrize("max_cost", [1.0, 0.8])
def test_the_budget_holds_readouts_included(max_cost: float) -> None:
    hosts, batch = hosts_of("timm-unusual"), batch_of("timm-unusual", 40)
    options: dict[str, Any] = {"readout": "logits", "student": True, "progress": False}
    ensemble = hydra.fold(hosts, inputs_of("timm-unusual"), max_cost=max_cost, **options)
    needed = hydra.cost(ensemble, batch).relative_to(hydra.cost(hosts[0], batch)).multiply_adds
    assert max_cost - 0.05 < needed <= max_cost
    (note,) = (note for note in ensemble.record["notes"] if "pruned" in note)
    assert f"max_cost is {max_cost}" in note
    hydra.verify(ensemble, batch)
