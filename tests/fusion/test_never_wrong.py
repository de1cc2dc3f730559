"""Never silently wrong: arguments of blocks, precision, embeddings, and what is saved."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles.errors import UnsupportedModelError, VerificationError
from hydra_ensembles.hosts import host_model
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE, gated

TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(name, **{"num_classes": 5, **TIMM, **options}).eval()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("vit_base_patch16_rope_mixed_224", {}, "rotary positions"),
        ("vit_relpos_base_patch16_cls_224", {}, "relative positions (rel_pos"),
    ],
)
def test_an_argument_that_is_not_understood_is_refused(
    name: str, options: dict[str, Any], reason: str
) -> None:
    found = host_model(timm_model(name, **options)).why_not_fused()
    assert found is not None
    assert reason in found


def test_a_body_refuses_an_argument_that_the_probe_did_not_see() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), LATE)
    with pytest.raises(UnsupportedModelError, match="rotary positions"):
        ensemble.body(torch.zeros(1, 17, 32), position_embeddings=torch.zeros(17, 8))


@pytest.mark.parametrize("name", ["vit", "bert", "clip-text", "timm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_verify_has_a_tolerance_for_every_type(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(zoo.host(name)).to(dtype)
    inputs = zoo.batch(name)
    inputs = inputs if isinstance(inputs, dict) else inputs.to(dtype)
    found = hydra.verify(hydra.fuse(model, EARLY), inputs)
    assert found.tolerance == {torch.bfloat16: 5e-2, torch.float64: 1e-9}[dtype]


def test_fuse_checks_itself_on_the_given_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_ensembles.fusion import fused_block as layers

    right = layers.FusedBlock._mlp
    monkeypatch.setattr(layers.FusedBlock, "_mlp", lambda self, x: 1.01 * right(self, x))
    inputs = zoo.batch("vit")
    with pytest.raises(VerificationError, match="differs by"):
        hydra.fuse(zoo.host("vit"), LATE, batch=inputs, engine="fused")
    with pytest.warns(UserWarning, match="failed its check"):
        ensemble = hydra.fuse(zoo.host("vit"), LATE, batch=inputs)
    assert ensemble.engine == "host", "what is not right is not taken"
    expected = gated(zoo.host("vit"), LATE, inputs)
    torch.testing.assert_close(ensemble.predict(inputs).member_logits, expected)


def test_auto_says_that_its_first_engine_failed() -> None:
    """Blocks that bound large states differ from our arithmetic on real states only."""
    from transformers.models.vit.modeling_vit import ViTLayer

    class BoundedLayer(ViTLayer):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states.clamp(-8, 8), *args, **kwargs)

    model = copy.deepcopy(zoo.host("vit"))
    for layer in model.vit.layers:
        layer.__class__ = BoundedLayer
    inputs = zoo.batch("vit")
    with torch.no_grad():
        model.vit.embeddings.position_embeddings *= 1000.0
    explanation = hydra.explain(model)
    assert explanation.engine == "fused", "random states are too small to tell"
    with pytest.raises(VerificationError, match="differs by"):
        hydra.fuse(model, LATE, batch=inputs, engine="fused")
    with pytest.warns(UserWarning, match="failed its check") as said:
        ensemble = hydra.fuse(model, LATE, batch=inputs)
    (warning,) = said
    text = str(warning.message)
    assert "ViTForImageClassification" in text
    assert "exact but slower" in text
    assert re.search(r"Member \d .* differs by \d", text)
    assert f"explain() says 'fused' ({explanation.engine_why})" in text
    assert warning.filename == __file__
    assert ensemble.engine == "host"
    expected = gated(model, LATE, inputs)
    torch.testing.assert_close(ensemble.predict(inputs).member_logits, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for, it needs no warning
        assert hydra.fuse(model, LATE, batch=inputs, engine="host").engine == "host"


def test_an_embedding_is_not_a_probability() -> None:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**zoo.SIZES, **zoo.IMAGE)).eval()
    ensemble = hydra.fuse(model, LATE)
    assert ensemble.task.name == "embedding"
    answer = ensemble.predict(zoo.batch("vit"))
    with pytest.raises(AttributeError, match="has no 'probabilities'"):
        answer.probabilities  # noqa: B018
    headless = timm_model("vit_tiny_patch16_224", num_classes=0)
    assert not hydra.fuse(headless, LATE).is_classifier
    assert all(hydra.fuse(zoo.host(n), LATE).is_classifier for n in ("vit", "timm"))
    assert not hydra.fuse(zoo.host("clip-vision"), LATE).is_classifier


def test_an_ensemble_is_of_its_own_class() -> None:
    assert type(hydra.fuse(zoo.host("vit"), LATE)) is hydra.HydraEnsemble


def test_pooling_with_prefix_tokens_comes_back(tmp_path: Path) -> None:
    from timm.models import VisionTransformer

    model = VisionTransformer(
        **TIMM, num_classes=5, global_pool="avg", pool_include_prefix=True, reg_tokens=2
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    ensemble = hydra.fuse(model, LATE)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.predict(x).probabilities, ensemble.predict(x).probabilities)


def test_a_host_that_would_come_back_different_must_be_given(tmp_path: Path) -> None:
    from timm.models import VisionTransformer

    model = VisionTransformer(**TIMM, num_classes=5).eval()
    model.norm.eps = 1.0  # no config tells
    with pytest.warns(UserWarning, match="logits differ"):
        hydra.fuse(model, LATE).save_pretrained(tmp_path)
    with pytest.raises(hydra.errors.FormatError, match="host="):
        hydra.HydraEnsemble.from_pretrained(tmp_path)
