"""The small ViT of the demo is an ordinary host: explained, pruned, fused, saved and rebuilt."""

from __future__ import annotations

from pathlib import Path

import torch

import hydra_ensembles as hydra
from hydra_ensembles.hosts.architecture import rebuild_host
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

CONFIG = TinyViTConfig(image_size=8, width=24, heads=3, layers=2, mlp_width=32)


def batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))}


def test_it_can_be_fused_and_reads_its_first_token() -> None:
    found = hydra.explain(TinyViT(CONFIG))
    assert found.fusable and found.family == "tiny-vit" and found.readout == "token 0"
    assert found.head_counts == (3, 3)


def test_a_saved_ensemble_comes_back_without_its_host(tmp_path: Path) -> None:
    masks = [hydra.HeadMask([[1, 1, 1], [1, 0, 0]]), hydra.HeadMask([[1, 1, 1], [0, 1, 1]])]
    ensemble = hydra.fuse(TinyViT(CONFIG).eval(), masks)
    hydra.verify(ensemble, batch())
    ensemble.save_pretrained(tmp_path)
    again = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(
        again.member_logits(batch()), ensemble.member_logits(batch()), rtol=0, atol=0
    )


def test_the_seed_decides_the_weights_and_leaves_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = TinyViT(CONFIG, seed=1), TinyViT(CONFIG, seed=1), TinyViT(CONFIG, seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.classifier.weight, same.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_rebuilt_from_plain_data() -> None:
    shape = {"library": "hydra-ensembles", "class": "TinyViT", "shape": CONFIG.to_dict()}
    model = rebuild_host(shape)
    assert model.state_dict().keys() == TinyViT(CONFIG).state_dict().keys()
