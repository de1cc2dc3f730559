"""Proposition 1: derivatives along pruning equal finite differences and full Hessians."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from hydra_ensembles.errors import DataError, MaskError
from hydra_ensembles.heads.gates import gate, prune_heads_
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.research.shift_gap import pruning_shift_gap


def vit(heads: int = 2, width: int = 8) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=8, patch_size=4, embed_dim=width, depth=2, num_heads=heads, num_classes=3
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
    return model.double()


GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.randn(12, 3, 8, 8, generator=GENERATOR).double()
LABELS = torch.arange(12) % 3
NOISY = IMAGES + torch.randn(12, 3, 8, 8, generator=GENERATOR).double()
CLEAN = [(IMAGES[:5], LABELS[:5]), (IMAGES[5:], LABELS[5:])]
SHIFTED = [(NOISY[:6], LABELS[:6]), (NOISY[6:], LABELS[6:])]
MASK = HeadMask([[1, 0], [0, 1]])


def loss(model: nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(images), LABELS))


def test_losses_before_and_after():
    model = vit()
    gap = pruning_shift_gap(model, MASK, CLEAN, SHIFTED, progress=False)
    cut = prune_heads_(copy.deepcopy(model), MASK)
    for part, images in ((gap.clean, IMAGES), (gap.shifted, NOISY)):
        assert part.before == pytest.approx(loss(model, images), abs=1e-6)
        assert part.after == pytest.approx(loss(cut, images), abs=1e-6)
        assert part.examples == 12
    assert gap.gap_before == pytest.approx(loss(model, NOISY) - loss(model, IMAGES), abs=1e-6)
    assert gap.gap_change == pytest.approx(gap.gap_after - gap.gap_before, abs=1e-9)
    assert gap.pruned_heads == 2


def test_gradient_and_curvature_equal_the_whole_gradient_and_hessian_of_w_o():
    """Build d, grad L and H over the entries of both W_O, and contract them."""
    model = vit()
    names = [f"blocks.{i}.attn.proj.weight" for i in range(2)]
    weights = [model.get_parameter(name).detach() for name in names]
    direction = torch.zeros(2, 8, 8, dtype=torch.float64)
    for layer, row in enumerate(MASK):
        columns = (~row).repeat_interleave(4)
        direction[layer][:, columns] = -weights[layer][:, columns]
    start, d = torch.stack(weights).flatten(), direction.flatten()
    for block in model.blocks:
        block.attn.fused_attn = False

    def mean_loss(flat: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        parts = dict(zip(names, flat.view(2, 8, 8), strict=True))
        return F.cross_entropy(functional_call(model, parts, (images,)), LABELS)

    gap = pruning_shift_gap(vit(), MASK, CLEAN, SHIFTED, progress=False)
    for part, images in ((gap.clean, IMAGES), (gap.shifted, NOISY)):
        gradient = jacobian(lambda flat, x=images: mean_loss(flat, x), start)
        whole = hessian(lambda flat, x=images: mean_loss(flat, x), start)
        assert part.gradient == pytest.approx(float(gradient @ d), abs=1e-6)
        assert part.curvature == pytest.approx(float(d @ whole @ d), abs=1e-6)
        remainder = part.after - part.before - part.gradient - part.curvature / 2
        assert part.remainder == pytest.approx(remainder, abs=1e-9)
    assert abs(gap.clean.gradient) > 1e-3 and abs(gap.shifted.curvature) > 1e-3
    assert gap.gradient_term == pytest.approx(gap.shifted.gradient - gap.clean.gradient)
    total = gap.gradient_term + gap.curvature_term + gap.remainder
    assert gap.gap_change == pytest.approx(total, abs=1e-9)


def test_second_order_is_exact_for_small_steps():
    """Along gates 1 - t the loss is before + t g + t^2 c / 2 up to third order."""
    model = vit()
    gap = pruning_shift_gap(model, MASK, CLEAN, SHIFTED, progress=False)

    def at(t: float) -> float:
        gates = [1 - t * (~row).double() for row in MASK]
        with gate(model, gates):
            return loss(model, IMAGES)

    step = 1e-3
    slope = (at(step) - at(-step)) / (2 * step)
    bend = (at(step) - 2 * at(0.0) + at(-step)) / step**2
    assert gap.clean.gradient == pytest.approx(slope, abs=1e-5)
    assert gap.clean.curvature == pytest.approx(bend, abs=1e-3)


def test_premises_and_conclusion_are_what_the_numbers_say():
    gap = pruning_shift_gap(vit(), MASK, CLEAN, SHIFTED, progress=False)
    assert gap.stationary == (abs(gap.clean.gradient) <= 2 * gap.clean.gradient_error)
    assert gap.shifted_gradient_not_negative == (gap.shifted.gradient >= 0)
    assert gap.curvature_grows == (gap.shifted.curvature > gap.clean.curvature)
    assert gap.conclusion == (gap.gap_after >= gap.gap_before)
    text = str(gap)
    assert "gap before" in text and "conclusion" in text
    assert json.loads(gap.to_json())["gap_change"] == gap.gap_change


def test_paired_data_gives_the_error_of_differences():
    model = vit()
    paired = pruning_shift_gap(model, MASK, CLEAN, SHIFTED, progress=False)
    cut = prune_heads_(copy.deepcopy(model), MASK)
    with torch.no_grad():
        change = [
            F.cross_entropy(cut(x), LABELS, reduction="none")
            - F.cross_entropy(model(x), LABELS, reduction="none")
            for x in (IMAGES, NOISY)
        ]
    difference = change[1] - change[0]
    expected = float(difference.std() / 12**0.5)
    assert paired.gap_change_error == pytest.approx(expected, abs=1e-6)
    unpaired = pruning_shift_gap(model, MASK, CLEAN, SHIFTED[:1], progress=False)
    assert unpaired.shifted.examples == 6


def test_several_shifts_and_batch_sizes():
    model = vit()
    a, b = (pruning_shift_gap(model, MASK, CLEAN, x, progress=False) for x in (SHIFTED, CLEAN))
    whole = pruning_shift_gap(model, MASK, [(IMAGES, LABELS)], [(NOISY, LABELS)], progress=False)
    assert a.gap_change == pytest.approx(whole.gap_change, abs=1e-9)
    assert a.curvature_term == pytest.approx(whole.curvature_term, abs=1e-9)
    assert b.gap_change == 0 and b.gap_change_error == 0


def test_hugging_face_with_padding_and_a_fused_backend():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=16,
        max_position_embeddings=16,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 30, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(4) % 2}
    wide = {k: F.pad(v, (0, 3)) if v.dim() == 2 else v for k, v in batch.items()}
    heads = HeadMask([[1, 0, 1], [1, 1, 0]])
    gap = pruning_shift_gap(model, heads, [batch], [wide], progress=False)
    assert gap.clean.curvature == pytest.approx(gap.shifted.curvature, abs=1e-6)
    assert gap.clean.gradient != 0


def test_nothing_pruned_changes_nothing_and_bad_input_is_refused():
    model = vit()
    gap = pruning_shift_gap(model, HeadMask.full(model), CLEAN, SHIFTED, progress=False)
    assert gap.gap_change == gap.gradient_term == gap.curvature_term == 0
    with pytest.raises(MaskError, match="layers"):
        pruning_shift_gap(model, HeadMask([[1, 0]]), CLEAN, SHIFTED)
    with pytest.raises(DataError, match="empty"):
        pruning_shift_gap(model, MASK, CLEAN, [], progress=False)
