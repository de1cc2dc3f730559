"""Edits of heads: by zero, mean and another example's output; overlaps and pictures."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts import host_model, main_output
from hydra_ensembles.research.head_roles import HeadMap, head_map, overlaps
from hydra_ensembles.search.headmap import find_circuit

from ..zoo import images, sharp
from .test_headmap import a_host, outliers


def test_zero_ablation_is_the_search_without_a_condition():
    model, data = a_host("vit")
    found = head_map(model, id=data, ood=outliers("vit"), progress=False)
    alone = find_circuit(model, id=data, condition="none", effects=True, progress=False)
    for mine, theirs in zip(found["nll"], alone.effects, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    assert set(found.effects) == {"error", "nll", "ece", "ood-auroc"}
    mask = HeadMask.random(model, keep=1, seed=3)
    below = head_map(model, id=data, below=mask, progress=False)
    assert below["nll"][0].tolist() == found["nll"][0].tolist()
    assert below["nll"][1].tolist() != found["nll"][1].tolist()


@pytest.mark.parametrize("edit", ["mean", "patch"])
def test_edits_equal_a_hook_that_overwrites_the_head(edit):
    model = sharp("timm")
    x, y = images(6)
    host = host_model(model)
    found = head_map(model, id=[(x, y)], edit=edit, progress=False)
    site = host.sites[0]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    donors = torch.empty_like(order)
    donors[order] = order.roll(1)

    def nll(head=None):
        def overwrite(module, inputs):
            a = inputs[0].unflatten(-1, (3, site.head_dim)).clone()
            new = a.mean(0, keepdim=True) if edit == "mean" else a[donors]
            a[:, :, head] = new[:, :, head]
            return (a.flatten(-2),)

        handle = site.output.register_forward_pre_hook(overwrite) if head is not None else None
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(main_output(model(x)), y)
        if handle:
            handle.remove()
        return float(loss)

    expected = [nll(head) - nll() for head in range(3)]
    torch.testing.assert_close(
        found["nll"][0], torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-4
    )


def test_decoders_are_patched_too():
    model, data = a_host("gpt2")
    for edit in ("zero", "patch"):
        assert head_map(model, id=data, edit=edit, progress=False)["nll"].shape == (3, 3)


def test_blocks_that_cannot_be_taken_apart_are_zeroed_only():
    from tests.fusion.test_hosted import batch, host

    data = [{**batch("gpt_oss"), "labels": torch.tensor([0, 1, 2, 3])}]
    with pytest.raises(UnsupportedModelError, match="zero-ablation"):
        head_map(host("gpt_oss"), id=data, edit="patch", progress=False)


def test_the_record_reads_back_and_circuits_overlap():
    model, data = a_host("vit")
    found = head_map(model, id=data, layers=[1], progress=False)
    assert HeadMap.from_json(found.to_json()).effects == found.effects
    assert (
        found["nll"][0].tolist() == [0.0] * 3
        and "clear of noise" in str(found)
        and "±" in str(found)
    )
    a, b = HeadMask([[1, 1, 0]]), HeadMask([[0, 1, 1]])
    assert overlaps({"a": a, "b": b}) == {("a", "b"): pytest.approx(1 / 3)}


def test_pictures():
    pytest.importorskip("matplotlib")
    from hydra_ensembles.research.figures import plot_effects, plot_members, plot_overlaps

    model, data = a_host("vit")
    circuit = find_circuit(model, id=data, keep=1, effects=True, progress=False)
    ax = plot_effects(circuit.effects, mask=circuit.mask, title="harm")
    assert ax.get_title() == "harm" and len(ax.patches) == circuit.mask.total_kept
    assert plot_members([circuit.mask, circuit.mask], ax=ax) is ax
    names = plot_overlaps({("a", "b"): 0.5}).get_xticklabels()
    assert [n.get_text() for n in names] == ["a", "b"]
