"""The fast search equals the naive one, whatever is cached, and goes on where it was stopped."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from hydra_ensembles._records import sealed
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.costs.formula import CostModel
from hydra_ensembles.data.batches import take
from hydra_ensembles.data.model_runs import call_model
from hydra_ensembles.errors import DataError, FormatError, MaskError
from hydra_ensembles.heads.gates import gate
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts import host_model, main_output
from hydra_ensembles.search.headmap import Circuit, find_circuit
from hydra_ensembles.search.objectives import as_objective, effect, objectives, placements
from hydra_ensembles.search.search_data import shifted
from hydra_ensembles.search.trunk_cache import Outputs, Prefix

from ..zoo import SHARP, images, labelled, texts, with_classes
from .naive import Sets, naive_headmap

FAMILIES = ("bert", "vit", "timm")


def batches(batch, size=2):
    count = len(batch[0]) if isinstance(batch, tuple) else len(batch["input_ids"])
    return [take(batch, slice(i, i + size)) for i in range(0, count, size)]


def outliers(name):
    if name in ("vit", "timm"):
        return [(3 * images(7)[0].flip(0),)]
    batch = texts((5, 6, 7, 3, 4))
    return [
        {"input_ids": batch["input_ids"].flip(0), "attention_mask": batch["attention_mask"].flip(0)}
    ]


def a_host(name):
    model, batch = with_classes(name), labelled(name)
    return model, batches(batch)


@pytest.mark.parametrize("name", list(SHARP))
def test_logits_of_masks_equal_the_gated_host(name):
    model, data = a_host(name)
    host = host_model(model)
    masks = [HeadMask.random(host, keep=k, seed=s) for s in range(4) for k in (1, 2)]
    masks.append(HeadMask.full(host))
    prefix = Prefix(host, {"id": data}, streams=3)
    for layer in range(len(host)):
        same = [m for m in masks if all(torch.equal(m[i], masks[0][i]) for i in range(layer))]
        found = prefix.logits(same).logits["id"]
        for place, mask in enumerate(same):
            with torch.no_grad(), gate(host, mask):
                expected = torch.cat([main_output(call_model(model, b)) for b in data])
            torch.testing.assert_close(found[:, place], expected, atol=2e-5, rtol=1e-4)
        prefix.advance(masks[0][layer])


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_naive_search(name):
    model, data = a_host(name)
    host = host_model(model)
    shift = list(shifted(data))
    sets = Sets({"id": data, "ood/given": outliers(name), "shift": shift})
    keep = [2] * len(host)
    for condition in ("knockout", "none", "keep"):
        for objective in ("id-loss", "ood-auroc", "nll-shift", "ece"):
            mask, effects = naive_headmap(host, sets, as_objective(objective), keep, condition)
            given: dict[str, Any] = {
                "id": data,
                "ood": outliers(name),
                "shift": shift,
                "objective": objective,
                "keep": keep,
                "condition": condition,
                "progress": False,
            }
            found = find_circuit(host, effects=True, **given)
            assert found.mask == mask, (objective, condition)
            assert find_circuit(host, **given) == mask, (objective, condition)
            for mine, theirs in zip(found.effects, effects, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_host_whose_blocks_are_not_ours_to_take_apart():
    model, data = a_host("gpt2")
    goal = as_objective("id-loss")
    mask, _ = naive_headmap(host_model(model), Sets({"id": data}), goal, [1, 2], "knockout")
    assert find_circuit(model, id=data, keep=[1, 2], progress=False) == mask


def test_the_average_is_the_mean_of_z_scores():
    model, data = a_host("vit")
    ood = outliers("vit")
    layer = 0
    each = [
        find_circuit(model, id=data, ood=ood, objective=o, effects=True, progress=False).effects[
            layer
        ]
        for o in ("id-loss", "ece", "ood-auroc")
    ]
    z = [(row - row.mean()) / row.std(correction=0) for row in each]
    both = find_circuit(model, id=data, ood=ood, objective="average", effects=True, progress=False)
    torch.testing.assert_close(both.effects[layer], torch.stack(z).mean(0))


def test_a_users_function_is_an_objective():
    model, data = a_host("vit")

    def largest_logit(outputs: Outputs) -> float:
        return float(outputs.logits["id"].max())

    circuit = find_circuit(
        model, id=data, objective=largest_logit, keep=1, effects=True, progress=False
    )
    assert circuit.objective == "largest_logit" and circuit.mask.kept == (1, 1)


def test_a_budget_says_how_many_heads_each_layer_keeps():
    model, data = a_host("bert")
    host = host_model(model)
    costs = CostModel(host, data[0])
    top = find_circuit(model, id=data, max_cost=0.9, layers=[2], progress=False)
    whole = find_circuit(model, id=data, max_cost=0.8, effects=True, progress=False)
    assert costs.ratio([top]) <= 0.9 and top.kept[:2] == (4, 4)
    assert costs.ratio([whole.mask]) <= 0.8 and min(whole.mask.kept) >= 1
    assert whole.mask.kept == Budget.of(host, data[0], 0.8).heads()
    counts = list(whole.mask.kept)
    assert whole.mask == find_circuit(model, id=data, keep=counts, progress=False)
    with pytest.raises(MaskError, match="give one"):
        find_circuit(model, id=data, keep=0.5, max_cost=0.9, progress=False)


def test_a_small_cache_changes_nothing():
    model, data = a_host("bert")
    whole = find_circuit(model, id=data, effects=True, progress=False)
    for size in (0, 4000):
        part = find_circuit(model, id=data, cache_bytes=size, effects=True, progress=False)
        assert part.effects == whole.effects and part.mask == whole.mask


def test_the_cache_is_bounded():
    model, data = a_host("vit")
    host = host_model(model)
    one = Prefix(host, {"id": data[:1]})._used
    prefix = Prefix(host, {"id": data}, cache_bytes=2 * one)
    assert len(prefix._cache) == 2 and prefix._used <= 2 * one


def test_data_in_another_order_at_each_reading_is_noticed():
    model, data = a_host("vit")

    class Shuffled:
        turn = 0

        def __iter__(self):
            self.turn += 1
            return iter(data if self.turn % 2 else data[::-1])

    ordered = [(x, y + torch.tensor([0, 1]) * 0) for x, y in data]
    assert ordered
    with pytest.raises(DataError, match="second reading"):
        find_circuit(model, id=Shuffled(), cache_bytes=0, progress=False)


def test_a_stopped_search_goes_on_and_a_changed_one_is_refused(tmp_path):
    model, data = a_host("bert")
    whole = find_circuit(model, id=data, folder=tmp_path / "whole", effects=True, progress=False)

    class Stopped(Exception):
        pass

    calls = 0

    def stops(outputs: Outputs) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise Stopped
        return as_objective("id-loss").value(outputs)

    stops.__name__ = "mine"
    goal = stops
    with pytest.raises(Stopped):
        find_circuit(
            model, id=data, objective=goal, folder=tmp_path / "part", effects=True, progress=False
        )
    resumed = find_circuit(
        model, id=data, objective=goal, folder=tmp_path / "part", effects=True, progress=False
    )
    assert resumed.mask == whole.mask
    assert resumed.effects.tolist() == whole.effects.tolist()
    with pytest.raises(FormatError, match="objective was"):
        find_circuit(
            model, id=data, objective="ece", folder=tmp_path / "part", effects=True, progress=False
        )
    with pytest.raises(FormatError, match="data has changed"):
        find_circuit(
            model,
            id=data[:2],
            objective=goal,
            folder=tmp_path / "part",
            effects=True,
            progress=False,
        )
    with torch.no_grad():
        model.classifier.bias.add_(1.0)
    with pytest.raises(FormatError, match="weights have changed"):
        find_circuit(
            model, id=data, objective=goal, folder=tmp_path / "part", effects=True, progress=False
        )


@pytest.mark.parametrize("condition", ["knockout", "keep", "none"])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_from_any_layer_on_it_ends_with_the_same_bits(tmp_path, condition, keep):
    model, data = a_host("bert")
    arguments = {"keep": keep, "condition": condition, "folder": tmp_path, "progress": False}
    whole = find_circuit(model, id=data, effects=True, **arguments)
    path = tmp_path / "search.json"
    state = json.loads(path.read_text())
    for done in range(len(whole.mask)):
        path.write_text(json.dumps(sealed({**state, "steps": state["steps"][:done]})))
        resumed = find_circuit(model, id=data, effects=True, **arguments)
        assert resumed.to_json() == whole.to_json()
    path.unlink()
    assert find_circuit(model, id=data, **arguments) == whole.mask
    state = json.loads(path.read_text())
    for done in range(len(whole.mask)):
        path.write_text(json.dumps(sealed({**state, "steps": state["steps"][:done]})))
        assert find_circuit(model, id=data, **arguments) == whole.mask
        assert json.loads(path.read_text()) == state


def test_what_a_pass_has_run_is_not_run_again():
    model, data = a_host("bert")  # 3 layers of 4 heads
    examples = sum(len(batch["labels"]) for batch in data)
    read = 0

    def count(module, inputs, output):
        nonlocal read
        read += len(output)

    def passes(effects, condition, keep):
        nonlocal read
        handle = model.classifier.register_forward_hook(count)
        read = 0
        find_circuit(
            model, id=data, condition=condition, keep=keep, effects=effects, progress=False
        )
        handle.remove()
        return read / examples

    cases = (("knockout", 2), ("knockout", 1), ("keep", 3), ("none", 2))
    runs = [passes(True, *case) for case in cases]
    assert [runs[0] - other for other in runs[1:]] == [2, 2, 2]  # two baselines of three
    assert [passes(False, *case) for case in cases] == [runs[0] - 3] * 4  # none at all


def test_a_damaged_state_is_refused(tmp_path):
    model, data = a_host("vit")
    (tmp_path / "search.json").write_text('{"version": 1, "sett')
    with pytest.raises(FormatError, match="not the state"):
        find_circuit(model, id=data, folder=tmp_path, progress=False)


def test_standard_errors_match_the_bootstrap():
    torch.manual_seed(0)
    base = Outputs(
        {"id": torch.randn(300, 1, 4), "ood/a": torch.randn(200, 1, 4)},
        {"id": torch.randint(4, (300,))},
    )
    noise = {k: v + 0.7 * torch.randn_like(v) for k, v in base.logits.items()}
    changed = Outputs(noise, base.labels)
    for name in ("id-loss", "ood-auroc"):
        goal = as_objective(name)
        value, error = effect(goal, changed, base)
        draws = []
        for _ in range(300):
            rows = {k: torch.randint(len(v), (len(v),)) for k, v in base.logits.items()}
            a, b = changed.examples(rows), base.examples(rows)
            draws.append(goal.value(a) - goal.value(b))
        spread = torch.tensor(draws).std().item()
        assert value == pytest.approx(goal.value(changed) - goal.value(base))
        assert error == pytest.approx(spread, rel=0.2)


def test_figures_equal_their_references():
    from sklearn.metrics import roc_auc_score
    from torchmetrics.classification import MulticlassCalibrationError

    generator = torch.Generator().manual_seed(0)
    own = torch.randint(9, (60,), generator=generator).float()
    other = torch.randint(3, 12, (40,), generator=generator).float()
    truth = [0] * 60 + [1] * 40
    for placed in placements(own, other):
        assert float(placed.mean()) == pytest.approx(roc_auc_score(truth, torch.cat([own, other])))
    logits = 2 * torch.randn(200, 5, generator=generator)
    labels = torch.randint(5, (200,), generator=generator)
    theirs = MulticlassCalibrationError(5, n_bins=15)(logits.softmax(-1), labels)
    outputs = Outputs({"id": logits[:, None]}, {"id": labels})
    assert as_objective("ece").value(outputs) == pytest.approx(float(theirs), abs=1e-6)


def test_labels_are_needed_and_unknown_objectives_named():
    model, data = a_host("vit")
    with pytest.raises(DataError, match="no labels"):
        find_circuit(model, id=[(x,) for x, _ in data], progress=False)
    with pytest.raises(KeyError, match="ood-auroc"):
        find_circuit(model, id=data, objective="ood-auroc2", progress=False)
    assert set(objectives) >= {"id-loss", "ood-auroc", "ece", "nll-shift", "average"}


def test_the_record_reads_back_and_shows_noise():
    model, data = a_host("vit")
    circuit = find_circuit(model, id=data, keep=1, effects=True, progress=False)
    back = Circuit.from_json(circuit.to_json())
    assert back == circuit and back.effects.standard_error == circuit.effects.standard_error
    assert "±" in str(circuit) and len(circuit.margins()) == 2


@pytest.mark.slow
@pytest.mark.skipif("HYDRA_SLOW" not in os.environ, reason="minutes long: set HYDRA_SLOW to run it")
def test_killed_at_random_moments_it_ends_bit_equal(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).parents[2] / "benchmarks" / "build_resume.py"
    options = ["--only", "circuit", "--kills", "10", "--out", str(tmp_path / "out.json")]
    command = [sys.executable, str(script), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and '"byte-equal": 10' in result.stdout, result.stderr
