"""Gate gradients: equal to hand-written loops, to the classic computation, for any batch size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import BatchEncoding, LlamaForCausalLM

from hydra_ensembles.criteria import HeadImportance, gate_gradients, score_heads
from hydra_ensembles.data.batches import take
from hydra_ensembles.errors import DataError, UnsupportedModelError
from hydra_ensembles.heads.gates import gate
from hydra_ensembles.hosts import host_model

from ..zoo import images, labelled, llama_config, seeded, sharp, texts, with_classes


def gradients_by_hand(model, batch):
    """Differentiate one sample at a time, in [heads] gates; no padding is left in a sample."""
    rows = []
    for i in range(len(batch["labels"])):
        length = int(batch["attention_mask"][i].sum())
        ids = batch["input_ids"][i : i + 1, :length]
        host = host_model(model)
        gates = [torch.ones(n, requires_grad=True) for n in host.head_counts]
        with gate(host, gates):
            logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits, batch["labels"][i : i + 1])
        rows.append(torch.stack(torch.autograd.grad(loss, gates)))
    return torch.stack(rows).double()  # [sample, layer, head]


def as_tensor(scores):
    return torch.stack(list(scores))


def test_all_gate_criteria_equal_a_per_sample_loop():
    model, batch = sharp("bert"), texts()
    g = gradients_by_hand(model, batch)
    scores = score_heads(model, [batch], criterion=["his", "taylor", "fisher"])
    torch.testing.assert_close(as_tensor(scores["his"]), g.abs().mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(as_tensor(scores["taylor"]), g.mean(0).abs(), atol=1e-6, rtol=0)
    torch.testing.assert_close(as_tensor(scores["fisher"]), g.square().mean(0), atol=1e-6, rtol=0)
    assert float(g.abs().max()) > 1e-3  # so that the tolerance means something


def test_his_ranks_as_the_classic_head_mask_gradient():
    """Multiply the attention probabilities by a head mask, as the scripts of Michel et al. do."""
    model, batch = sharp("bert", "eager"), texts((5, 5, 5, 5))
    heads = [4, 4, 4]
    importance = torch.zeros(3, 4)
    for i in range(len(batch["labels"])):
        masks = [torch.ones(n, requires_grad=True) for n in heads]
        handles = []
        for site, mask in zip(host_model(model).sites, masks, strict=True):

            def scale(_, inputs, output, mask=mask):  # probabilities times mask, then values
                context, _ = output
                return (context.unflatten(-1, (4, 6)) * mask[:, None]).flatten(-2), None

            handles.append(site.module.register_forward_hook(scale))
        one = take(batch, slice(i, i + 1))
        model(**one).loss.backward(inputs=masks)
        for handle in handles:
            handle.remove()
        importance += torch.stack([mask.grad.abs() for mask in masks])
    scores = score_heads(model, [batch], criterion="his")
    classic = importance.flatten().argsort(descending=True).tolist()
    assert [layer * 4 + head for layer, head in scores.ranking()] == classic


@pytest.mark.parametrize("name", ["bert", "vit", "llama", "open_clip_visual"])
def test_scores_do_not_depend_on_the_batch_size(name):
    model, batch = with_classes(name), labelled(name)
    count = 6
    names = ["his", "taylor", "fisher", "entropy", "hies"]
    whole = score_heads(model, [batch], criterion=names)
    singles = score_heads(
        model, [take(batch, slice(i, i + 1)) for i in range(count)], criterion=names
    )
    uneven = score_heads(
        model, [take(batch, slice(0, 4)), take(batch, slice(4, 6))], criterion=names
    )
    for other in (singles, uneven):
        for key in names:
            torch.testing.assert_close(whole[key].flat(), other[key].flat(), atol=1e-5, rtol=0)


def test_his_takes_absolute_values_per_sample_not_per_batch():
    model, batch = sharp("bert"), texts()
    g = gradients_by_hand(model, batch)
    his = as_tensor(score_heads(model, [batch], criterion="his"))
    assert not torch.allclose(his, g.mean(0).abs(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "side"),
    [(name, "right") for name in ("bert", "distilbert", "gpt2", "llama")]
    + [(name, "left") for name in ("gpt2", "llama")],  # BERT reads token 0: never padded left
)
def test_more_padding_changes_nothing(name, side):
    model = sharp(name)
    batch = texts((5, 3, 4), side=side)
    if side == "left":  # absolute positions would move with the padding
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    pad = (0, 4) if side == "right" else (4, 0)
    wider = {k: F.pad(v, pad) if v.dim() == 2 else v for k, v in batch.items()}
    names = ["his", "taylor", "fisher", "entropy"]
    tight = score_heads(model, [batch], criterion=names)
    loose = score_heads(model, [wider], criterion=names)
    for key in names:
        torch.testing.assert_close(tight[key].flat(), loose[key].flat(), atol=1e-5, rtol=0)


def test_batches_of_every_kind_give_the_same():
    model, batch = sharp("bert"), texts()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    expected = score_heads(model, [batch])
    assert score_heads(model, [(inputs, batch["labels"])]) == expected
    assert score_heads(model, [BatchEncoding(batch)]) == expected
    assert score_heads(model, iter([batch])) == expected  # one pass is enough


def test_a_loss_of_ones_own():
    model, batch = sharp("bert"), texts()
    scores = score_heads(
        model,
        [batch],
        loss=lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    )
    assert scores == score_heads(model, [batch])
    # without labels: how far the most probable class's logit moves
    free = {k: v for k, v in batch.items() if k != "labels"}
    other = score_heads(model, [free], loss=lambda logits, labels: logits.amax(-1))
    assert other != scores


def test_losses_that_cannot_be_used_are_refused():
    model, batch = sharp("bert"), texts()
    free = {k: v for k, v in batch.items() if k != "labels"}
    with pytest.raises(DataError, match="no labels"):
        score_heads(model, [free], criterion="his")
    with pytest.raises(DataError, match="one number"):
        score_heads(model, [batch], loss=F.cross_entropy)
    with pytest.raises(DataError, match=r"one whole class number per example.*pass task="):
        score_heads(model, [{**batch, "labels": torch.rand(6, 3)}])
    with pytest.raises(UnsupportedModelError, match="no gradient"):
        score_heads(model, [batch], loss=lambda logits, labels: logits.detach().amax(-1))
    with pytest.raises(DataError, match="is empty"):
        score_heads(model, [])
    with pytest.raises(DataError, match="data is None"):
        score_heads(model, None, criterion="his")


def test_language_models_score_the_next_token_without_padding():
    model = seeded(lambda: LlamaForCausalLM(llama_config()))
    batch = texts((6, 4))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ours = gate_gradients(model, batch)
    for i, length in enumerate((6, 4)):  # the host's own loss on each sample alone
        ids = batch["input_ids"][i : i + 1, :length]
        gates = [torch.ones(1, 4, requires_grad=True) for _ in range(2)]
        with gate(model, gates):
            loss = model(input_ids=ids, labels=ids).loss
        theirs = torch.autograd.grad(loss, gates)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[i : i + 1], b, atol=1e-6, rtol=1e-4)


def test_the_model_is_left_as_it_was():
    model, batch = sharp("timm"), images()
    model.train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    score_heads(model, [batch], criterion=["his", "entropy"])
    assert model.training and not model.blocks[0].training and model.blocks[1].training
    assert all(p.grad is None for p in model.parameters())
    assert not model.head.weight.requires_grad
    assert (
        not model.blocks[0].attn._forward_hooks and not model.blocks[0].attn.proj._forward_pre_hooks
    )
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_layers_can_be_normalised():
    model, batch = sharp("vit"), images()
    scores = score_heads(model, [batch], criterion=HeadImportance(normalize_layers=True))
    for row in scores:
        assert float(row.norm()) == pytest.approx(1.0)
    assert scores.name == "his(normalize_layers=True)"


def test_bfloat16_models_can_be_scored():
    model, batch = sharp("bert").to(torch.bfloat16), texts()
    scores = score_heads(model, [batch], criterion=["his", "entropy"])
    close = score_heads(sharp("bert"), [batch], criterion=["his", "entropy"])
    torch.testing.assert_close(scores["entropy"].flat(), close["entropy"].flat(), atol=0.02, rtol=0)
    torch.testing.assert_close(scores["his"].flat(), close["his"].flat(), atol=0.05, rtol=0.2)


def test_a_scored_model_can_be_copied() -> None:
    import copy

    import timm

    sizes = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4)}
    model = timm.create_model("tiny_vit_5m_224", num_classes=3, **sizes).eval()
    data = [(torch.randn(2, 3, 64, 64), torch.tensor([0, 2]))]
    score_heads(model, data, criterion="his", progress=False)
    copy.deepcopy(model)  # its cache of biases holds no graph
