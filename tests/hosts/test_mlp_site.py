"""Neurons are found by running an MLP, and a removal equals a gate."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.errors import MaskError, UnsupportedModelError
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.block import Block
from hydra_ensembles.hosts.families import TIMM
from hydra_ensembles.hosts.mlp_site import cut_neurons_, mlp_site, why_no_neurons
from tests import zoo

WIDTH, NEURONS = 8, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = 2


def block_with(mlp: nn.Module) -> Block:
    module = nn.Module()
    module.attn, module.mlp = Attention(), mlp
    return Block.of(0, module, TIMM)


class Mlp(nn.Module):
    """An MLP of which parts can be changed: how many rows a neuron has, what is between."""

    def __init__(self, rows: int = 1, between: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, rows * NEURONS), nn.Linear(NEURONS, WIDTH)
        self.between = between or nn.Identity()
        self.hidden_features = NEURONS

    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.act(self.fc1(x))))


class Packed(Mlp):
    def __init__(self) -> None:
        super().__init__(rows=2)

    def act(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


class Interleaved(Packed):
    def act(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]


class Split(Packed):
    """It splits by a width that it remembers."""

    def act(self, x: Tensor) -> Tensor:
        gate, up = x.split(self.hidden_features, -1)
        return gate.sigmoid() * up


class Reversed(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x).flip(-1)


class TwoInputs(Mlp):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + other)


class TokenMix(nn.Module):
    """A convolution over tokens, one for each neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(NEURONS, NEURONS, 3, padding=1, groups=NEURONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("mlp", "packed", "interleaved"),
    [(Mlp(), 1, False), (Packed(), 2, False), (Interleaved(), 2, True), (Split(), 2, False)],
    ids=["two linears", "packed", "interleaved", "split by a width"],
)
def test_neurons_of_a_form_are_found_and_removed(mlp: Mlp, packed: int, interleaved: bool) -> None:
    block = block_with(mlp)
    site = mlp_site(block)
    assert (site.first, site.second, site.neurons) == (("mlp.fc1",), "mlp.fc2", NEURONS)
    assert (site.packed, site.interleaved) == (packed, interleaved)
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        mlp.fc2.weight[:, [1, 4]] = 0.0  # what gates do
        expected = mlp(x)
        cut_neurons_(block, [0, 2, 3, 5])
        torch.testing.assert_close(mlp(x), expected, atol=1e-6, rtol=1e-6)
    assert (mlp.fc1.out_features, mlp.fc2.in_features, mlp.hidden_features) == (4 * packed, 4, 4)
    assert mlp_site(block).neurons == 4


@pytest.mark.parametrize(
    ("mlp", "words"),
    [
        (Mlp(between=nn.LayerNorm(NEURONS)), r"depend on each other \(mlp.between\)"),
        (Mlp(between=nn.Softmax(-1)), "depend on each other$"),
        (Mlp(between=TokenMix()), "needs all its neurons"),
        (Reversed(), "in an order that we do not know"),
        (TwoInputs(), "cannot be run on its own .*'other'"),
        (nn.Linear(WIDTH, WIDTH), "does not have two linear layers"),
        (nn.ModuleDict({"experts": Mlp()}), "a mixture of experts, which stay whole"),
    ],
    ids=["norm", "softmax", "convolution", "order", "inputs", "one linear", "experts"],
)
def test_neurons_that_must_stay_say_why(mlp: nn.Module, words: str) -> None:
    block = block_with(mlp)
    with pytest.raises(UnsupportedModelError, match=f"neurons of block 0 stay: .*{words[:15]}"):
        mlp_site(block)
    reason = why_no_neurons(block)
    assert reason is not None
    assert re.search(words, reason), reason


def test_a_probe_changes_nothing() -> None:
    block = block_with(Packed())
    before = copy.deepcopy(block.module.state_dict())
    mlp_site(block)
    after = block.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.module.modules())


@pytest.mark.parametrize("kept", [[], [NEURONS], [-1]])
def test_neurons_that_are_not_there_cannot_be_kept(kept: list[int]) -> None:
    with pytest.raises(MaskError, match="has the neurons 0 to 5"):
        cut_neurons_(block_with(Mlp()), kept)


@pytest.mark.parametrize("name", zoo.MAKERS)
def test_a_host_without_neurons_equals_one_whose_neurons_are_silent(name: str) -> None:
    model: Any = zoo.make(name)
    batch = zoo.batch(name)
    whole = zoo.run(model, batch)
    for block in host_model(model).blocks:
        site = mlp_site(block)
        second: Any = block.module.get_submodule(site.second)
        off = torch.arange(site.neurons) % 3 == block.index % 3
        with torch.no_grad():
            weight = second.weight.t() if type(second).__name__ != "Conv1D" else second.weight
            weight[off] = 0.0
    silent = zoo.run(model, batch)
    for block in host_model(model).blocks:
        off = torch.arange(mlp_site(block).neurons) % 3 == block.index % 3
        cut_neurons_(block, (~off).nonzero().flatten().tolist())
    assert float((silent - whole).abs().max()) > 1e-2
    torch.testing.assert_close(zoo.run(model, batch), silent, atol=1e-5, rtol=1e-5)
