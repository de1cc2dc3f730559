"""What chooses and trains members takes the task's loss: criteria, search, build, fold, distil."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.builder.auto_choice import Auto
from hydra_ensembles.data.batches import labels_of, split_batch
from hydra_ensembles.data.model_runs import member_logits, output_of
from hydra_ensembles.errors import HydraError, UnsupportedModelError
from hydra_ensembles.hosts import host_model
from hydra_ensembles.methods import Circuits, Select
from hydra_ensembles.research.rivals import MemberStack, make_baseline
from hydra_ensembles.tasks import task_of
from hydra_ensembles.training.settings import DISTILL, FINETUNE
from tests import zoo
from tests.tasks.test_tasks import HOSTS, host, inputs, labels

NAMES = ["labels", "numbers", "tags", "questions"]
Batch = dict[str, torch.Tensor]


def data(name: str, count: int = 3, size: int = 12) -> list[Batch]:
    """Batches with the host's own answers as labels, so that members can be better or worse."""
    batches = []
    for seed in range(count):
        batch = inputs(name, size=size, seed=10 + seed)
        with torch.no_grad():
            outputs = output_of(host(name), batch)
        if name == "labels":
            given = {"labels": (outputs > 0).float()}
        elif name == "numbers":
            given = {"labels": outputs + torch.tensor([-0.5, 1.0] * (size // 2))[:, None]}
        elif name == "tags":
            real = batch["attention_mask"].bool()
            given = {"labels": outputs.argmax(-1).masked_fill(~real, -100)}
        else:
            given = {"start_positions": outputs[:, 0].argmax(-1)}
            given["end_positions"] = outputs[:, 1].argmax(-1)
        batches.append({**batch, **given})
    return batches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("criterion", ["taylor", "hies"])
def test_criteria_read_the_gradient_of_the_loss(name: str, criterion: str) -> None:
    model, known = host(name), data(name, count=1, size=4)
    scores = hydra.score_heads(model, known, criterion=criterion, progress=False)
    assert [len(row) for row in scores] == [zoo.HEADS] * zoo.LAYERS
    assert float(torch.stack(list(scores)).abs().max()) > 0
    if criterion == "taylor":  # by hand: one batch per example, gates of one layer
        view = host_model(model)
        total = torch.zeros(zoo.HEADS)
        for row in range(4):
            one = {key: value[row : row + 1] for key, value in known[0].items()}
            _, kwargs, _ = split_batch(one)
            gates = [torch.ones(1, zoo.HEADS, requires_grad=True) for _ in range(zoo.LAYERS)]
            with hydra.gate(view, gates):
                outputs = view.read(model(**kwargs))
                given = view.task.check_labels(labels_of(one), "the test")
                loss = view.task.losses(outputs, given, kwargs["attention_mask"])
            total += torch.autograd.grad(loss.sum(), gates)[-1][0]
        torch.testing.assert_close(scores[-1].float(), (total / 4).abs(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [Select(masks=6, stems=2), Circuits(keep=0.5), "taylor"])
def test_members_are_built(name: str, method: Any) -> None:
    ensemble = hydra.build(
        host(name), data(name), method=method, members=2, max_cost=2.0, progress=False
    )
    assert ensemble.task.name == HOSTS[name][0] and ensemble.members == 2
    assert ensemble.novelty is not None and ensemble.score in ensemble.task.scores
    answer = ensemble.predict(inputs(name))
    assert answer.novelty.shape == (4,)
    assert ensemble.temperature is None or ensemble.task.classifies


@pytest.mark.parametrize("name", ["labels", "numbers"])
def test_the_default_method_compares_losses(name: str) -> None:
    ensemble = hydra.build(
        host(name), data(name), method=Auto(), max_cost=3.0, progress=False, novelty=False
    )
    decision = ensemble.record["auto"]
    assert "Loss on" in decision["why"] and decision["chosen"] in decision["nll"]


def test_a_given_task_is_built() -> None:
    model = zoo.host("bert")
    batches = []
    for seed in range(3):
        batch = zoo.batch("bert", size=12, seed=seed)
        marks = torch.randint(0, 2, (12, 5), generator=torch.Generator().manual_seed(seed))
        batches.append({**batch, "labels": marks.float()})
    ensemble = hydra.build(
        model, batches, task="multi-label", method="random", members=2, max_cost=2.0, progress=False
    )
    assert ensemble.task.name == "multi-label"
    with pytest.raises(UnsupportedModelError, match="no labels"):
        hydra.build(host("encoder"), [inputs("encoder", size=40)], progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_lowers_the_loss(name: str) -> None:
    known = [{**inputs(name, size=8), **labels(name, size=8)}]
    quick = replace(FINETUNE, epochs=6, learning_rate=1e-2, warmup=0.0)
    [trained] = hydra.finetune(host(name), known, settings=quick, validation=known, progress=False)
    with torch.no_grad():
        before = host(name)(**known[0]).loss
        after = trained.model.eval()(**known[0]).loss
    assert float(after) < float(before)
    history = [entry["nll"] for entry in trained.history]
    assert history[-1] < history[0]
    assert ("accuracy" in trained.history[0]) is False


@pytest.mark.parametrize("name", ["labels", "numbers"])
def test_hosts_are_folded_and_distilled(name: str) -> None:
    known = data(name, count=12, size=24)
    others = hydra.finetune(
        host(name), known[:2], seed=[0, 1], epochs=1, learning_rate=1e-3, progress=False
    )
    hosts = [member.model for member in others]
    by_logits = hydra.fold(hosts, known, readout="logits", held_out=known[:2], progress=False)
    batch = inputs(name)
    assert by_logits.task.name == HOSTS[name][0]
    follow = by_logits.member_logits(batch)
    own = torch.stack([output_of(model.eval(), batch) for model in hosts], 1).detach()
    spread = (own - own.mean(0, keepdim=True)).abs().mean()
    assert float((follow.detach() - own).abs().mean()) < float(spread)
    student = hydra.distill(
        host(name),
        hosts,
        known,
        members=2,
        max_cost=2.0,
        settings=replace(DISTILL, epochs=1, views=1, distill=0.5),
        progress=False,
    )
    assert student.task.name == HOSTS[name][0] and student.novelty is not None
    assert student.temperature is None


@pytest.mark.parametrize("name", ["tags", "questions"])
def test_hosts_of_tokens_are_folded_by_states(name: str, tmp_path: Path) -> None:
    known = data(name, count=6, size=24)
    others = hydra.finetune(
        host(name), known[:2], seed=[0, 1], epochs=1, learning_rate=1e-3, progress=False
    )
    hosts = [member.model.eval() for member in others]
    with pytest.raises(UnsupportedModelError, match="student=False"):
        hydra.fold(hosts, known, student=True, progress=False)
    with pytest.raises(UnsupportedModelError, match='readout="states"'):
        hydra.fold(hosts, known, readout="logits", progress=False)
    with pytest.raises(HydraError, match=r"Pass max_cost=1\.[\d]+\."):
        hydra.fold(hosts, known, progress=False)
    folded = hydra.fold(hosts, known, max_cost=1.3, held_out=known[:2], progress=False)
    assert folded.student is None and folded.task.name == HOSTS[name][0]
    batch = inputs(name)
    follow = folded.member_logits(batch).detach()
    own = torch.stack([output_of(model, batch) for model in hosts], 1).detach()
    real = batch["attention_mask"].bool()
    if name == "questions":
        follow, own = follow.transpose(2, 3), own.transpose(2, 3)
    off, apart = (follow - own).abs().mean((1, 3)), (own - own.mean(1, keepdim=True)).abs()
    assert float(off[real].mean()) < float(apart.mean((1, 3))[real].mean())
    folded.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(
        loaded.predict(batch).member_logits, folded.predict(batch).member_logits
    )


def test_an_encoder_is_not_folded() -> None:
    with pytest.raises(UnsupportedModelError, match="no answer to fold"):
        hydra.fold([host("encoder")] * 2, [inputs("encoder", size=30)], progress=False)


def test_tokens_and_spans_are_not_distilled() -> None:
    for name in ("tags", "questions"):
        with pytest.raises(HydraError, match="more than one answer"):
            hydra.distill(host(name), [host(name)], data(name), members=1, progress=False)


@pytest.mark.parametrize("name", ["labels", "numbers"])
def test_a_plain_host_is_pruned(name: str) -> None:
    pruned = hydra.prune(
        host(name), data(name, count=8, size=16), max_cost=0.8, held_out=data(name), progress=False
    )
    assert hydra.cost(pruned, inputs(name)).relative_to(hydra.cost(host(name), inputs(name)))
    assert type(pruned) is type(host(name))


@pytest.mark.parametrize("name", ["classes", "number", *NAMES])
@torch.no_grad()
def test_rivals_answer_as_their_hosts_do(name: str) -> None:
    batch = inputs(name)
    own = output_of(host(name), batch)
    dropout = make_baseline("mc-dropout", host(name), members=3, options={"rate": 1e-7})
    for rival in (dropout, MemberStack([host(name)] * 3)):
        assert task_of(rival) == task_of(host(name))
        found = member_logits(rival, batch)
        assert found.shape == (len(own), 3, *own.shape[1:])
        torch.testing.assert_close(found, own[:, None].expand_as(found))
