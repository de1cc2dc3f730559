"""Fused == members one by one == gated host, for every family, switch and mask."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.errors import (
    MaskError,
    UnknownNameError,
    UnsupportedModelError,
    VerificationError,
)
from hydra_ensembles.heads.gates import gate, prune_heads_
from tests import zoo

LATE = [
    HeadMask([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]]),
    HeadMask([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0]]),
    HeadMask([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1]]),
]
EARLY = [
    HeadMask([[1, 0, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]]),
    HeadMask([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]),
    HeadMask([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
]
TREE = [LATE[0], LATE[1], *[HeadMask([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]])] * 2]
EQUAL = [HeadMask([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]])] * 2
SETS = {"late": LATE, "early": EARLY, "tree": TREE, "equal": EQUAL}
SWITCHES = [
    {},
    {"share_trunk": False},
    {"share_branch": False},
    {"readout_only": False},
    {"share_trunk": False, "share_branch": False, "readout_only": False},
]


def gated(model: nn.Module, masks: list[HeadMask], inputs: object) -> torch.Tensor:
    outputs = []
    for mask in masks:
        with gate(model, mask):
            outputs.append(zoo.run(model, inputs))
    return torch.stack(outputs, 1)


def members_of(ensemble: hydra.HydraEnsemble, inputs: object) -> torch.Tensor:
    with torch.no_grad():
        return ensemble.member_logits(inputs)


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("name", zoo.FUSABLE)
def test_fused_equals_gated_members_with_every_switch(name: str, kind: str) -> None:
    model, inputs, masks = zoo.host(name), zoo.batch(name), SETS[kind]
    expected = gated(model, masks, inputs)
    assert (expected[:, 0] - zoo.run(model, inputs)).abs().max() > 1e-3, "masks must matter"
    for switches in SWITCHES:
        ensemble = hydra.fuse(model, masks, **switches)
        torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)
    loop = hydra.fuse(model, masks, mode="loop")
    torch.testing.assert_close(members_of(loop, inputs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["vit", "bert", "clip-text", "clip-vision"])
def test_attention_backends_agree(name: str, backend: str) -> None:
    model = copy.deepcopy(zoo.host(name))
    model.set_attn_implementation(backend)
    ensemble = hydra.fuse(model, EARLY)
    expected = gated(model, EARLY, zoo.batch(name))
    torch.testing.assert_close(members_of(ensemble, zoo.batch(name)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_left_padding(name: str) -> None:
    inputs = {key: value.flip(1) for key, value in zoo.batch(name).items()}
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    expected = gated(zoo.host(name), EARLY, inputs)
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ragged_and_empty_layers(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["vit", "bert", "timm-unusual"]))
    row = st.lists(st.booleans(), min_size=zoo.HEADS, max_size=zoo.HEADS)
    table = st.lists(row, min_size=zoo.LAYERS, max_size=zoo.LAYERS)
    masks = [HeadMask(rows) for rows in data.draw(st.lists(table, min_size=1, max_size=8))]
    model, inputs = zoo.host(name), zoo.batch(name, size=2)
    expected = gated(model, masks, inputs)
    for switches in data.draw(st.sampled_from([SWITCHES[:1], SWITCHES[1:3], SWITCHES[3:]])):
        actual = members_of(hydra.fuse(model, masks, **switches), inputs)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def perturbed(model: nn.Module, seed: int, only: str = "") -> nn.Module:
    """Return a copy whose parameters moved, as if it had been fine-tuned."""
    result = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if only in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return result


def with_merged(members: list[nn.Module], parts: tuple[str, ...]) -> list[nn.Module]:
    """Average the parameters whose names contain one of the parts, by hand."""
    result = [copy.deepcopy(member) for member in members]
    named = [dict(member.named_parameters()) for member in result]
    with torch.no_grad():
        for name in named[0]:
            if any(part in name for part in parts):
                mean = torch.stack([table[name] for table in named]).mean(0)
                for table in named:
                    table[name].copy_(mean)
    return result


MERGED = {
    "vit": ("mlp.", "embeddings."),
    "bert": ("intermediate.", "output.dense", "embeddings."),
    "timm": ("mlp.", "patch_embed", "cls_token", "pos_embed"),
}


@pytest.mark.parametrize("name", list(MERGED))
def test_finetuned_members_equal_themselves_with_merged_mlps(name: str) -> None:
    members = [perturbed(zoo.host(name), seed) for seed in range(3)]
    inputs = zoo.batch(name)
    ensemble = hydra.fuse(members, EARLY)
    parts = MERGED[name]
    reference = with_merged(members, tuple(p for p in parts if p != "output.dense"))
    if name == "bert":  # attention.output.dense is W_O and stays; output.dense is the MLP's
        named = [dict(m.named_parameters()) for m in reference]
        with torch.no_grad():
            for key in named[0]:
                if "output.dense" in key and "attention" not in key:
                    mean = torch.stack([table[key] for table in named]).mean(0)
                    for table in named:
                        table[key].copy_(mean)
    expected = torch.cat(
        [gated(m, [mask], inputs) for m, mask in zip(reference, EARLY, strict=True)], 1
    )
    torch.testing.assert_close(members_of(ensemble, inputs), expected, atol=1e-5, rtol=0)
    assert ensemble.merged == ("MLPs", "embeddings")
    hydra.verify(ensemble, inputs)


def test_members_that_differ_in_the_classifier_alone_share_all_blocks() -> None:
    members = [perturbed(zoo.host("vit"), seed, only="classifier") for seed in range(3)]
    ensemble = hydra.fuse(members, [LATE[0]] * 3)
    assert ensemble.plan.trunk == 2
    assert ensemble.plan.layers[0].streams == 1
    expected = torch.cat([gated(m, LATE[:1], zoo.batch("vit")) for m in members], 1)
    actual = members_of(ensemble, zoo.batch("vit"))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_pruned_members_are_taken_by_their_recorded_masks() -> None:
    members = [prune_heads_(copy.deepcopy(zoo.host("vit")), mask) for mask in EARLY]
    expected = gated(zoo.host("vit"), EARLY, zoo.batch("vit"))
    for masks in (None, EARLY):
        ensemble = hydra.fuse(members, masks)
        assert list(ensemble.masks) == EARLY
        actual = members_of(ensemble, zoo.batch("vit"))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    hydra.verify(ensemble, zoo.batch("vit"))


def test_average_all_leaves_only_heads_apart() -> None:
    members = [perturbed(zoo.host("vit"), seed) for seed in range(2)]
    ensemble = hydra.fuse(members, EARLY[:2], average="all")
    assert not ensemble.copies
    hydra.verify(ensemble, zoo.batch("vit"))


@pytest.mark.parametrize("name", ["vit", "bert", "timm", "clip-text", "zero-shot-open-clip"])
def test_verify_agrees_and_untie_changes_nothing(name: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    before = members_of(ensemble, zoo.batch(name))
    assert hydra.verify(ensemble, zoo.batch(name)).largest <= 1e-5
    ensemble.untie_()
    after = members_of(ensemble, zoo.batch(name))
    torch.testing.assert_close(before, after, atol=1e-5, rtol=0)
    hydra.verify(ensemble, zoo.batch(name))
    heads = ensemble.body.branch[-1].bank
    assert len(heads) == sum(mask.kept[-1] for mask in EARLY)


@pytest.mark.parametrize("name", ["vit", "bert", "timm"])
def test_members_may_own_their_mlps_at_the_same_cost(name: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), EARLY)
    before = members_of(ensemble, zoo.batch(name))
    ensemble.untie_()
    counted = hydra.cost(ensemble, zoo.batch(name))
    shared = sum(p.numel() for p in ensemble.parameters())
    ensemble.untie_(mlps=True)
    torch.testing.assert_close(before, members_of(ensemble, zoo.batch(name)), atol=1e-5, rtol=0)
    assert sum(p.numel() for p in ensemble.parameters()) > shared
    assert hydra.cost(ensemble, zoo.batch(name)).multiply_adds == counted.multiply_adds
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the second member alone
        for parameter in nn.ModuleList(ensemble.body.branch[-1].mlp_of(1)).parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    after = members_of(ensemble, zoo.batch(name))
    torch.testing.assert_close(before[:, [0, 2]], after[:, [0, 2]], atol=1e-5, rtol=0)
    assert (before[:, 1] - after[:, 1]).abs().max() > 0.01
    hydra.verify(ensemble, zoo.batch(name))


def test_verify_names_the_first_layer_at_which_they_part() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    bank = ensemble.body.branch[1].bank
    with torch.no_grad():  # the packed copy no longer follows the bank
        bank.packed().projections[0][1].data *= 1.5
    with pytest.raises(VerificationError, match="first at layer 1"):
        hydra.verify(ensemble, zoo.batch("vit"))


def test_a_member_is_a_plain_host_again() -> None:
    ensemble = hydra.fuse(zoo.host("bert"), TREE)
    for index, mask in enumerate(TREE):
        member = ensemble.member(index)
        assert type(member) is type(zoo.host("bert"))
        assert member.hydra_head_mask == mask
        expected = gated(zoo.host("bert"), [mask], zoo.batch("bert"))[:, 0]
        actual = zoo.run(member, zoo.batch("bert"))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_shared_heads_are_stored_once() -> None:
    model = zoo.host("vit")
    masks = [HeadMask.random(model, keep=0.75, seed=s) for s in range(3)]
    ensemble = hydra.fuse(model, masks)
    stored = sum(p.numel() for p in ensemble.parameters())
    assert stored <= 1.01 * sum(p.numel() for p in model.parameters())


def test_fuse_refuses_what_it_cannot_do() -> None:
    with pytest.raises(MaskError, match="2 layers but ViTForImageClassification has 3"):
        hydra.fuse(zoo.host("vit"), [HeadMask([[1, 1, 1, 1]] * 2)])
    with pytest.raises(MaskError, match="at least one member"):
        hydra.fuse(zoo.host("vit"), [])
    from tests.fusion.test_hosted import host

    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        hydra.fuse(host("mixtral"), EARLY, engine="fused")
    with pytest.raises(UnsupportedModelError, match="Members differ in shape"):
        hydra.fuse([zoo.host("vit"), zoo.host("timm")], EARLY[:2])
    with pytest.raises(UnknownNameError, match=r"Unknown mode 'quick'. Known: fused, loop"):
        hydra.fuse(zoo.host("vit"), EARLY, mode="quick")
