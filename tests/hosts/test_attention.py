"""The one attention equals softmax(q k^T) v written out, with everything that hosts add to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.hosts.attention import Rotary, attend
from hydra_ensembles.hosts.host import HostModel
from tests import zoo

BATCH, TOKENS, HEADS, WIDTH = 2, 5, 3, 4
SCALE = 0.3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(q: Tensor, k: Tensor, v: Tensor, extra: Tensor, softcap: float | None) -> Tensor:
    """Attend sample by sample, head by head and query by query."""
    result = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                scores = SCALE * (k[b, :, h] @ q[b, t, h])
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                weights = (scores + extra[b, h, t]).exp()
                result[b, t, h] = (weights / weights.sum()) @ v[b, :, h]
    return result


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_it_equals_the_formula(
    softcap: float | None, causal: bool, padded: bool, biased: bool
) -> None:
    q, k, v = (random(BATCH, TOKENS, HEADS, WIDTH, seed=seed) for seed in range(3))
    bias = random(1, HEADS, TOKENS, TOKENS, seed=3) if biased else None
    mask = None
    if padded:  # a mask replaces causal attention
        mask = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
        mask[1, ..., -2:] = False
    extra = torch.zeros(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    if padded:
        extra = extra.masked_fill(~mask, float("-inf"))
    elif causal:
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        extra = extra.masked_fill(later, float("-inf"))
    extra = extra if bias is None else extra + bias
    found = attend(q, k, v, scale=SCALE, mask=mask, causal=causal, bias=bias, softcap=softcap)
    expected = written_out(q, k, v, extra, softcap)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_norms_come_before_rotations_and_queries_of_few_tokens_keep_their_angles() -> None:
    q, k, v = (random(BATCH, TOKENS, HEADS, WIDTH, seed=seed) for seed in range(3))
    angles = random(1, TOKENS, WIDTH // 2, seed=3).repeat(1, 1, 2)
    rotary = Rotary(angles.cos(), angles.sin(), pairs=False)
    norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    whole = attend(q, k, v, scale=SCALE, rotary=rotary, norms=(norm, None))
    turned = (rotary.turn(x.transpose(1, 2)).transpose(1, 2) for x in (norm(q), k))
    torch.testing.assert_close(whole, attend(*turned, v, scale=SCALE))

    def last(x: Tensor) -> Tensor:
        return x[:, -1:]

    few = attend(last(q), k, v, scale=SCALE, rotary=rotary, rows=last, norms=(norm, None))
    torch.testing.assert_close(few, last(whole))


def test_a_copy_of_a_host_takes_its_facts_and_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostModel(zoo.host("llama"))
    facts = host.facts
    assert facts.arithmetic.rotary == "halves"
    model = copy.deepcopy(host.model)
    monkeypatch.setattr(model, "forward", None)  # a call would fail
    assert HostModel(model, family=host.family, facts=facts).facts == facts
