"""Attention entropy without the matrix: the softmax's, on every backend and at every edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hydra_ensembles.criteria import (
    AttentionEntropy,
    AttentionView,
    EntropyKind,
    row_entropies,
    score_heads,
    watch_attention,
)
from hydra_ensembles.criteria import attention_entropy as module
from hydra_ensembles.criteria.attention_watch import _dense, _near, split_mask
from hydra_ensembles.errors import DataError, HydraError, UnsupportedModelError
from hydra_ensembles.hosts import host_model

from ..zoo import images, labelled, sharp, texts

HUGGING_FACE = ["bert", "distilbert", "vit", "clip_text", "gpt2", "llama"]
CAUSAL = {"clip_text", "gpt2", "llama", "open_clip_text"}


def entropy_by_hand(
    attentions: list[torch.Tensor], mask: torch.Tensor | None, *, causal: bool
) -> list[list[float]]:
    """Loop over samples, heads and rows of softmax matrices `[batch, heads, rows, keys]`."""
    table = []
    for weights in attentions:
        weights = weights.double()
        row_of_heads = []
        for head in range(weights.shape[1]):
            samples = []
            for i, matrix in enumerate(weights[:, head]):
                real = range(len(matrix)) if mask is None else mask[i].nonzero().flatten().tolist()
                values = []
                for t in real:
                    seen = [k for k in real if k <= t] if causal else list(real)
                    if len(seen) > 1:
                        p = matrix[t, seen]
                        values.append(-float(torch.xlogy(p, p).sum()) / math.log(len(seen)))
                if values:
                    samples.append(sum(values) / len(values))
            row_of_heads.append(sum(samples) / len(samples))
        table.append(row_of_heads)
    return table


def eager_attentions(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the softmax matrices of an eager Hugging Face model."""
    inputs = (
        {"pixel_values": batch[0]}
        if isinstance(batch, tuple)
        else {key: value for key, value in batch.items() if key != "labels"}
    )
    with torch.no_grad():
        return list(model(**inputs, output_attentions=True).attentions)


def check(scores, by_hand, tolerance=1e-5):
    expected = torch.tensor(by_hand, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(list(scores)), expected, atol=tolerance, rtol=0)
    assert float(expected.min()) >= 0 and float(expected.max()) <= 1 and float(expected.std()) > 0


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_equals_the_eager_softmax_on_hugging_face(name, backend):
    batch = labelled(name)
    mask = None if isinstance(batch, tuple) else batch["attention_mask"]
    attentions = eager_attentions(sharp(name, "eager"), batch)
    by_hand = entropy_by_hand(attentions, mask, causal=name in CAUSAL)
    check(score_heads(sharp(name, backend), [batch], criterion="entropy"), by_hand)


def softmax_of(attention: nn.Module, x: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Compute the softmax of timm's or torch's packed attention from its weights."""
    weight = attention.qkv.weight if hasattr(attention, "qkv") else attention.in_proj_weight
    bias = attention.qkv.bias if hasattr(attention, "qkv") else attention.in_proj_bias
    q, k, _ = F.linear(x, weight, bias).chunk(3, -1)
    q, k = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in (q, k))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8)
    if causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("timm", True),
        ("timm", False),
        ("timm_qk_norm", True),
        ("timm_qk_norm", False),
        ("open_clip_visual", True),
        ("open_clip_text", True),
    ],
)
def test_equals_the_softmax_on_timm_and_open_clip(name, fused):
    model, batch = sharp(name), labelled(name)
    host = host_model(model)
    attentions: list[torch.Tensor] = []
    handles = []
    for site in host.sites:
        if not fused:
            site.module.fused_attn = False

        def keep(attention, inputs, kwargs):
            x = inputs[0] if inputs else kwargs["query"]
            attentions.append(softmax_of(attention, x, causal=name in CAUSAL))

        handles.append(site.module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(batch[0] if isinstance(batch, tuple) else batch["input_ids"])
    for handle in handles:
        handle.remove()
    by_hand = entropy_by_hand(attentions, None, causal=name in CAUSAL)
    check(score_heads(model, [batch], criterion="entropy"), by_hand)


def random_view(seed=0, *, batch=2, heads=3, rows=9, width=8, groups=3, **options):
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(batch, heads, rows, width, generator=generator)
    key = torch.randn(batch, groups, rows, width, generator=generator)
    return AttentionView(0, query, key, scale=0.4, **options)


def rows_by_hand(view: AttentionView) -> torch.Tensor:
    """Float64 and the whole matrix."""
    key = view.key.double().repeat_interleave(view.query.shape[1] // view.key.shape[1], 1)
    scores = view.query.double() @ key.transpose(-1, -2) * view.scale
    if view.bias is not None:
        scores = scores + view.bias.double()
    if view.causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    if view.hidden is not None:
        scores = scores.masked_fill(view.hidden, float("-inf"))
    p = scores.softmax(-1)
    return -torch.xlogy(p, p).sum(-1)


def views():
    hidden = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    hidden[0, ..., 6:] = True
    pairs = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.4
    pairs[..., 0] = False  # every row sees a key
    generator = torch.Generator().manual_seed(4)
    key_bias = torch.randn(2, 1, 1, 9, generator=generator)
    head_bias = torch.randn(1, 3, 1, 9, generator=generator)
    pair_bias = torch.randn(1, 3, 9, 9, generator=generator)
    return {
        "plain": random_view(),
        "causal": random_view(causal=True),
        "padding": random_view(hidden=hidden),
        "causal and padding": random_view(hidden=hidden, causal=True),
        "pairs hidden": random_view(hidden=pairs),
        "grouped queries": random_view(heads=6, groups=2, causal=True),
        "key bias": random_view(bias=key_bias),
        "key bias by head, padding": random_view(bias=head_bias, hidden=hidden),
        "pair bias": random_view(bias=pair_bias),
        "pair bias, padding": random_view(bias=pair_bias, hidden=hidden),
        "one sample": random_view(batch=1, rows=2),
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("use_kernel", [True, False])
def test_rows_equal_the_matrix(name, use_kernel):
    view = views()[name]
    found = row_entropies(view, use_kernel=use_kernel)
    torch.testing.assert_close(found.double(), rows_by_hand(view), atol=1e-5, rtol=0)


def test_the_kernel_is_there_and_is_used(monkeypatch):
    assert module.kernel_works("cpu")
    monkeypatch.setattr(module, "_by_blocks", None)  # calling it would raise
    row_entropies(views()["key bias by head, padding"])
    with pytest.raises(TypeError):
        row_entropies(views()["pair bias"])


def test_a_missing_or_wrong_kernel_falls_back(monkeypatch):
    view = random_view()
    expected = rows_by_hand(view)

    def wrong(*args):
        return args[0], args[0].sum(-1)

    for broken in (wrong, None):
        module.kernel_works.cache_clear()
        monkeypatch.setattr(module, "_lse_attention", broken)
        assert not module.kernel_works("cpu")
        torch.testing.assert_close(row_entropies(view).double(), expected, atol=1e-5, rtol=0)
    module.kernel_works.cache_clear()
    monkeypatch.undo()
    assert module.kernel_works("cpu") and not module.kernel_works("mps")


@given(st.integers(2, 40), st.integers(1, 3), st.booleans(), st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_blocks_of_any_size_agree(rows, batch, causal, block):
    view = random_view(batch=batch, rows=rows, causal=causal)
    expected = row_entropies(view)
    before, module.BLOCK = module.BLOCK, block
    try:
        found = row_entropies(view, use_kernel=False)
    finally:
        module.BLOCK = before
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_bfloat16_is_computed_in_float32():
    view = random_view(rows=40, width=64)
    half = AttentionView(0, view.query.bfloat16(), view.key.bfloat16(), scale=0.2)
    expected = rows_by_hand(half)
    for use_kernel in (True, False):
        found = row_entropies(half, use_kernel=use_kernel)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    scores = half.query @ half.key.transpose(-1, -2) * half.scale
    naive = scores.logsumexp(-1) - (scores.softmax(-1) * scores).sum(-1)
    assert float((naive.double() - expected).abs().max()) > 1e-2  # what it would cost


def test_keys_far_from_the_origin_do_not_cancel():
    """A shift that all keys share changes no softmax, but would eat the digits of both terms."""
    view = random_view()
    far = AttentionView(0, view.query, view.key + 100, scale=view.scale)
    torch.testing.assert_close(row_entropies(far), row_entropies(view), atol=2e-4, rtol=0)


def test_one_hot_rows_are_zero_and_never_negative():
    query = torch.eye(6)[None, None] * 400
    view = AttentionView(0, query, torch.eye(6)[None, None], scale=1.0)
    for use_kernel in (True, False):
        found = row_entropies(view, use_kernel=use_kernel)
        assert float(found.min()) >= 0 and float(found.max()) < 1e-6


def test_rows_without_keys_and_with_one_key_do_not_count():
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    hidden[0, 0, 0] = True  # sees nothing
    hidden[0, 0, 1, 1:] = True  # sees one key
    view = random_view(batch=1, rows=4, hidden=hidden)
    assert view.visible_keys()[0, 0].tolist() == [0, 1, 4, 4]
    assert view.counted_rows()[0, 0].tolist() == [False, False, True, True]
    found = row_entropies(view)
    assert bool(found.isfinite().all()) and float(found[..., :2].abs().max()) < 1e-6
    expected = rows_by_hand(view)[..., 2:].mean(-1) / math.log(4)
    torch.testing.assert_close(AttentionEntropy().values(view), expected, atol=1e-5, rtol=0)


def test_samples_of_one_token_are_left_out():
    model = sharp("bert")
    alone = score_heads(model, [texts((5,))], criterion="entropy")
    with_single = score_heads(model, [texts((5, 1))], criterion="entropy")
    torch.testing.assert_close(alone.flat(), with_single.flat(), atol=1e-6, rtol=0)
    with pytest.raises(DataError, match="single token"):
        score_heads(model, [texts((1, 1))], criterion="entropy")


def test_masks_are_read_as_what_they_hide():
    for hiding in (float("-inf"), torch.finfo(torch.float32).min, -1e4):
        hidden, bias = split_mask(torch.tensor([0.0, hiding, 0.0]))
        assert hidden.tolist() == [[[[False, True, False]]]] and bias is None
    hidden, bias = split_mask(torch.tensor([0.5, float("-inf"), 0.0]))
    assert hidden[0, 0, 0].tolist() == [False, True, False]
    assert bias[0, 0, 0].tolist() == [0.5, 0.0, 0.0]
    assert split_mask(torch.ones(2, 1, 3, 3, dtype=torch.bool)) == (None, None)


@pytest.mark.parametrize(("kind", "order"), [("renyi", 2.0), ("renyi", 0.5), ("tsallis", 2.0)])
def test_other_entropies_equal_their_definitions(kind, order):
    view = views()["causal and padding"]
    key = view.key.double()
    scores = view.query.double() @ key.transpose(-1, -2) * view.scale
    scores = scores + torch.full((9, 9), float("-inf")).triu(1)
    p = scores.masked_fill(view.hidden, float("-inf")).softmax(-1)
    power = (p**order).sum(-1)
    expected = power.log() / (1 - order) if kind == "renyi" else (1 - power) / (order - 1)
    found = row_entropies(view, EntropyKind(kind, order))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    minimum = row_entropies(view, EntropyKind("min"))
    torch.testing.assert_close(minimum.double(), -p.amax(-1).log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["shannon", "renyi", "tsallis", "min"])
def test_every_kind_is_one_for_uniform_and_zero_for_one_hot_attention(kind):
    even = AttentionView(0, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    torch.testing.assert_close(
        AttentionEntropy(kind).values(even), torch.ones(1, 2, dtype=torch.float64)
    )
    sharp = AttentionView(0, torch.eye(5)[None, None] * 400, torch.eye(5)[None, None])
    assert float(AttentionEntropy(kind).values(sharp)) < 1e-6


def test_kinds_meet_where_they_should():
    view = random_view()
    shannon = row_entropies(view)
    for kind in ("renyi", "tsallis"):
        torch.testing.assert_close(row_entropies(view, EntropyKind(kind, 1.0)), shannon)
        near = row_entropies(view, EntropyKind(kind, 1.001))
        torch.testing.assert_close(near, shannon, atol=5e-3, rtol=0)
    torch.testing.assert_close(
        row_entropies(view, EntropyKind("renyi", 200.0)),
        row_entropies(view, EntropyKind("min")),
        atol=0.02,
        rtol=0.02,
    )
    with pytest.raises(HydraError, match="renyi"):
        AttentionEntropy("gini")
    with pytest.raises(HydraError, match="positive"):
        AttentionEntropy("renyi", order=0.0)


def test_blocks_keep_memory_bounded():
    """No tensor of a blocked pass is as large as an eighth of the matrix."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    view = random_view(batch=1, heads=12, groups=12, rows=512, width=16)
    matrix = 12 * 512 * 512 * 4
    for kind in (EntropyKind(), EntropyKind("renyi"), EntropyKind("min")):
        with Sizes():
            row_entropies(view, kind)
        assert 0 < largest <= matrix / 8


@pytest.mark.parametrize("name", ["bert", "llama", "timm", "open_clip_visual"])
def test_the_host_runs_as_before_while_it_is_watched(name):
    model, batch = sharp(name), labelled(name)
    inputs = (batch[0],) if isinstance(batch, tuple) else ()
    kwargs = {} if inputs else {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        plain = model(*inputs, **kwargs)
        with watch_attention(host_model(model), lambda view: None):
            watched = model(*inputs, **kwargs)
        after = model(*inputs, **kwargs)
    first = [o if isinstance(o, torch.Tensor) else o.logits for o in (plain, watched, after)]
    torch.testing.assert_close(first[0], first[1], atol=1e-5, rtol=0)
    assert torch.equal(first[0], first[2])


def test_the_table_of_attention_functions_is_restored():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    for backend in ("sdpa", "eager"):
        with pytest.raises(RuntimeError, match="stop"):
            score_heads(sharp("bert", backend), failing(), criterion="entropy")
        assert dict(ALL_ATTENTION_FUNCTIONS) == before


def failing():
    yield texts()
    raise RuntimeError("stop")


def test_a_users_own_backend_is_kept():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def mine(module, query, key, value, attention_mask, **kwargs):
        calls.append(attention_mask is not None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("mine", mine)
    ALL_MASK_ATTENTION_FUNCTIONS.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = sharp("bert")
    model.set_attn_implementation("mine")
    found = score_heads(model, [texts()], criterion="entropy")
    assert calls == [True] * 3
    torch.testing.assert_close(
        found.flat(), score_heads(sharp("bert"), [texts()], criterion="entropy").flat()
    )
    del ALL_ATTENTION_FUNCTIONS._global_mapping["mine"]
    del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["mine"]


def test_masks_of_flash_and_flex_attention_are_understood():
    from torch.nn.attention.flex_attention import create_block_mask

    query = key = torch.zeros(2, 1, 6, 4)
    flat = torch.ones(2, 6, dtype=torch.long)
    flat[0, 4:] = 0
    dense, hides_all = _dense(flat, query, key)
    assert dense.shape == (2, 1, 1, 6) and dense[0, 0, 0].tolist() == [True] * 4 + [False] * 2
    assert not hides_all  # the kernel is causal by its flag
    near = _near(query, key, 2, True)
    assert (near & torch.ones(6, 6).tril().bool())[0, 0].sum(-1).tolist() == [1, 2, 2, 2, 2, 2]
    assert _near(query, key, 2, False)[0, 0].sum(-1).tolist() == [2, 3, 3, 3, 3, 2]

    def later(b, h, q, k):
        return q >= k

    block = create_block_mask(later, 2, None, 6, 6, device="cpu", BLOCK_SIZE=2)
    dense, hides_all = _dense(block, query, key)
    assert hides_all and torch.equal(dense[1, 0], torch.ones(6, 6).tril().bool())


def test_attention_that_cannot_be_seen_is_refused():
    class Odd(nn.Module):
        num_heads = 3

        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x, attn_mask=None, is_causal=False):
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.transpose(-1, -2)).relu()
            return self.proj(weights @ v)

    model = sharp("timm")
    for block in model.blocks:
        block.attn = Odd()
    with pytest.raises(UnsupportedModelError, match="was not seen"):
        score_heads(model, [images()], criterion="entropy")
    assert len(score_heads(model, [images()], criterion="his")) == 2


def test_changed_scores_are_refused():
    from transformers import Gemma2Config, Gemma2ForSequenceClassification

    config = Gemma2Config(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=32,
        num_labels=3,
        attn_implementation="eager",
        pad_token_id=0,
    )
    model = Gemma2ForSequenceClassification(config).eval()
    with pytest.raises(UnsupportedModelError, match="softcap"):
        score_heads(model, [texts()], criterion="entropy")
