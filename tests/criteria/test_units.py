"""Scores of neurons: each criterion against its formula, together with the heads'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ensembles.criteria import head_scoring as module
from hydra_ensembles.criteria import score_heads, score_units
from hydra_ensembles.data.batches import take
from hydra_ensembles.errors import HydraError, MaskError
from hydra_ensembles.heads import UnitScores, gate
from hydra_ensembles.hosts import host_model

from .. import zoo
from ..zoo import sharp, texts

NAMES = ["energy", "fisher", "his", "taylor", "magnitude", "random"]


@pytest.mark.parametrize("name", zoo.MAKERS)
def test_every_criterion_scores_units_of_every_family(name: str) -> None:
    model = zoo.host(name)
    host = host_model(model)

    def size(logits: Tensor, labels: Any) -> Tensor:
        return logits.flatten(1).square().sum(1)

    tables = score_units(model, [zoo.batch(name)], criterion=list(NAMES), loss=size)
    assert list(tables) == NAMES
    alone = score_heads(model, [zoo.batch(name)], criterion=list(NAMES), loss=size)
    for key, scores in tables.items():
        assert scores.neurons.shape == host.neuron_counts and scores.name == key
        assert float(scores.neurons.flat().min()) >= 0 and float(scores.neurons.flat().std()) > 0
        torch.testing.assert_close(scores.heads.flat(), alone[key].flat(), atol=1e-6, rtol=1e-4)


def test_gradients_are_those_of_each_sample_alone() -> None:
    model, batch = sharp("bert"), texts()
    host = host_model(model)
    rows = []
    for sample in range(6):
        gates = [torch.ones(n, requires_grad=True) for n in host.neuron_counts]
        one = take(batch, slice(sample, sample + 1))
        with torch.enable_grad(), gate(model, [None] * len(host), gates):
            loss = model(**one).loss
        rows.append(torch.cat(torch.autograd.grad(loss, gates)).double())
    alone = torch.stack(rows)
    tables = score_units(model, [batch], criterion=["taylor", "his", "fisher"])
    expected = {"taylor": alone.mean(0).abs(), "his": alone.abs().mean(0)}
    expected["fisher"] = alone.square().mean(0)
    for name, values in expected.items():
        torch.testing.assert_close(tables[name].neurons.flat(), values, atol=1e-7, rtol=1e-3)


def test_energy_is_the_mean_square_of_what_a_unit_writes() -> None:
    model, batch = sharp("bert"), texts()
    layer = model.bert.encoder.layer[1]
    seen: dict[str, Tensor] = {}
    linears = {"heads": layer.attention.output.dense, "neurons": layer.output.dense}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda _, x, y, name=name: seen.update({name: x[0]}))
    with torch.no_grad():
        model(**batch)
    scores = score_units(model, [batch])
    real = batch["attention_mask"].bool()
    for name, width in (("heads", 6), ("neurons", 1)):
        weight = linears[name].weight.detach().double()
        for unit in (0, 1, 3):
            columns = slice(unit * width, (unit + 1) * width)
            written = seen[name][real][:, columns].double() @ weight[:, columns].t()
            found = float(getattr(scores, name)[1][unit])
            assert found == pytest.approx(float(written.square().sum(1).mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_magnitude_is_the_norm_of_all_weights_of_a_neuron(name: str) -> None:
    model = sharp(name)
    block = host_model(model).blocks[1].module
    paths = ["mlp.gate_proj", "mlp.up_proj"] if name == "llama" else ["intermediate.dense"]
    second = "mlp.down_proj" if name == "llama" else "output.dense"
    parts = [block.get_submodule(path).weight[5] for path in paths]  # type: ignore[index]
    parts.append(block.get_submodule(second).weight[:, 5])  # type: ignore[index]
    expected = float(torch.cat(parts).detach().norm())
    found = score_units(model, None, criterion="magnitude").neurons[1][5]
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_batches_and_padding_do_not_matter() -> None:
    model, batch = sharp("bert"), texts()
    longer = {
        key: torch.nn.functional.pad(value, (0, 3)) if value.dim() == 2 else value
        for key, value in batch.items()
    }
    ways = [
        [batch],
        [longer],
        [take(batch, slice(0, 1)), take(batch, slice(1, 4)), take(batch, slice(4, 6))],
    ]
    tables = [score_units(model, data, criterion=["energy", "fisher"]) for data in ways]
    for name in ("energy", "fisher"):
        first = tables[0][name]
        for other in tables[1:]:
            for kind in ("heads", "neurons"):
                ours, theirs = getattr(other[name], kind).flat(), getattr(first, kind).flat()
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-8)


def test_all_units_cost_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = module.call_model
    monkeypatch.setattr(module, "call_model", lambda *a: calls.append(1) or original(*a))
    score_units(sharp("bert"), [texts(), texts()], criterion=list(NAMES))
    assert len(calls) == 2


def test_scores_of_attention_know_no_neurons() -> None:
    for criterion in ("entropy", "hies"):
        with pytest.raises(HydraError, match="scores attention, and neurons have none"):
            score_units(sharp("bert"), [texts()], criterion=criterion)


def test_tables_are_written_and_read() -> None:
    scores = score_units(sharp("vit"), None, criterion="random")
    assert UnitScores.from_json(scores.to_json()) == scores
    assert str(scores).splitlines()[0] == (
        "UnitScores (random): 2 layers, 6 heads, 64 neurons, higher = keep"
    )
    mask = scores.top_k(0.5)
    assert mask.neurons.kept == (16, 16) and mask.heads.kept == (2, 2)
    assert float(scores.neurons[0][mask.neurons[0]].min()) > float(
        scores.neurons[0][~mask.neurons[0]].max()
    )
    with pytest.raises(MaskError, match="one row of each per layer"):
        UnitScores(scores.heads, type(scores.neurons)([[1.0]]))
