"""Gates and physical removal agree; gates carry gradients; parameter counts fall as they should."""

from __future__ import annotations

import copy

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.errors import MaskError
from hydra_ensembles.hosts import host_model, main_output
from tests import zoo

MASK = HeadMask([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
LLAMA = HeadMask([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("name", list(zoo.MAKERS))
def test_gate_equals_removal(name: str) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    mask = LLAMA if name == "llama" else MASK
    with hydra.gate(model, mask):
        gated = zoo.run(model, inputs)
    assert (gated - zoo.run(model, inputs)).abs().max() > 1e-3, "the mask must matter"
    pruned = hydra.prune_heads_(copy.deepcopy(model), mask)
    torch.testing.assert_close(zoo.run(pruned, inputs), gated, atol=1e-5, rtol=0)
    torch.testing.assert_close(zoo.run(copy.deepcopy(pruned), inputs), gated, atol=1e-5, rtol=0)
    assert pruned.hydra_head_mask == mask
    assert host_model(pruned).head_counts == mask.kept


@pytest.mark.parametrize("name", ["vit", "bert", "timm"])
def test_parameter_counts_fall_by_the_heads(name: str) -> None:
    model = zoo.host(name)
    pruned = hydra.prune_heads_(copy.deepcopy(model), MASK)
    gone = sum(MASK.shape) - MASK.total_kept
    by_head = 3 * (8 * 32 + 8) + 8 * 32  # rows and biases of q, k, v; columns of W_O
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, pruned))
    assert before - after == gone * by_head


def test_the_output_bias_stays_in_an_empty_layer() -> None:
    model = copy.deepcopy(zoo.host("vit"))
    with torch.no_grad():
        model.vit.layers[1].attention.o_proj.bias += 1.0
    x = torch.randn(2, 5, 32)
    hydra.prune_heads_(model, MASK)
    out, _ = model.vit.layers[1].attention(x)
    torch.testing.assert_close(out, model.vit.layers[1].attention.o_proj.bias.expand_as(x))


def test_pruning_twice_is_recorded_in_terms_of_the_original_heads() -> None:
    model = copy.deepcopy(zoo.host("bert"))
    hydra.prune_heads_(model, HeadMask([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]]))
    hydra.prune_heads_(model, HeadMask([[1, 0, 1], [1, 1, 1, 0], [0, 1]]))
    expected = HeadMask([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0]])
    assert model.hydra_head_mask == expected
    with hydra.gate(zoo.host("bert"), expected):
        gated = zoo.run(zoo.host("bert"), zoo.batch("bert"))
    torch.testing.assert_close(zoo.run(model, zoo.batch("bert")), gated, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit", "bert", "timm", "zero-shot-open-clip", "gpt2"])
def test_gates_carry_gradients_by_sample(name: str) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    gates = [torch.ones(4, 4, requires_grad=True) for _ in range(3)]
    with hydra.gate(model, gates):
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    logits = main_output(output)
    per_sample = logits.flatten(1).square().sum(1)
    per_sample.sum().backward()
    step = 1e-2
    moved = [torch.ones(4) for _ in range(3)]
    moved[1][2] += step
    with hydra.gate(model, moved):
        after = zoo.run(model, inputs).flatten(1).square().sum(1)
    moved[1][2] -= 2 * step
    with hydra.gate(model, moved):
        before = zoo.run(model, inputs).flatten(1).square().sum(1)
    slope = (after - before) / (2 * step)
    torch.testing.assert_close(gates[1].grad[:, 2], slope, atol=2e-2, rtol=2e-2)


def test_the_model_is_as_before_after_the_context() -> None:
    model, inputs = zoo.host("zero-shot-open-clip"), zoo.batch("vit")
    before = zoo.run(model, inputs)
    keys = list(model.state_dict())
    with pytest.raises(RuntimeError), hydra.gate(model, MASK):
        raise RuntimeError
    assert torch.equal(zoo.run(model, inputs), before)
    assert list(model.state_dict()) == keys


def test_wrong_gates_are_refused() -> None:
    model = zoo.host("vit")
    with pytest.raises(MaskError, match="2 gates"):
        hydra.gate(model, [None, None]).__enter__()
    with pytest.raises(MaskError, match=r"\[batch, heads\]"):
        hydra.gate(model, [torch.ones(5), None, None]).__enter__()
    with pytest.raises(MaskError, match="layer 1"):
        hydra.gate(model, HeadMask([[1, 1, 1, 1], [1, 1, 1], [1, 1, 1, 1]])).__enter__()
