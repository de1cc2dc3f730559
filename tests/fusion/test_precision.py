"""Half precision: saved and loaded to the bit, buffers included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble
from tests import zoo

LATE = [
    HeadMask([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]),
    HeadMask([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]),
]
DECODERS = ("Llama", "Gemma2", "Qwen2")


def loaded_by_transformers(family: str, dtype: torch.dtype, folder: Path) -> Any:
    """Save a tiny decoder in float32 and load it as users do, in another precision."""
    import transformers

    options = {"head_dim": 8} if family == "Gemma2" else {}
    config = getattr(transformers, f"{family}Config")(
        **zoo.SIZES, **zoo.TEXT, num_key_value_heads=2, **options
    )
    kind = getattr(transformers, f"{family}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=dtype).eval()


def members_of(ensemble: HydraEnsemble, inputs: Any) -> Tensor:
    with torch.no_grad():
        return ensemble.member_logits(inputs)


def types_of(model: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.named_buffers()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", DECODERS)
def test_a_half_precision_decoder_is_loaded_to_the_bit(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = loaded_by_transformers(family, dtype, tmp_path / "host")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # transformers keeps it there
    ensemble = hydra.fuse(model, LATE).eval()
    expected = members_of(ensemble, zoo.batch("llama"))
    ensemble.save_pretrained(tmp_path / "saved")
    for host in (None, model):
        loaded = HydraEnsemble.from_pretrained(tmp_path / "saved", host=host)
        assert types_of(loaded.host) == types_of(ensemble.host)
        assert torch.equal(members_of(loaded, zoo.batch("llama")), expected)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_that_was_cast_with_its_buffers_is_loaded_to_the_bit(
    family: str, tmp_path: Path
) -> None:
    model = loaded_by_transformers(family, torch.float32, tmp_path / "host")
    ensemble = hydra.fuse(model, LATE).eval().to(torch.bfloat16)
    expected = members_of(ensemble, zoo.batch("llama"))
    ensemble.save_pretrained(tmp_path / "saved")
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved")
    assert set(types_of(loaded.host).values()) == {torch.bfloat16}
    assert torch.equal(members_of(loaded, zoo.batch("llama")), expected)


def test_a_known_class_that_cannot_be_built_again_says_why(tmp_path: Path) -> None:
    model = loaded_by_transformers("Llama", torch.float32, tmp_path / "host")
    model.model.rotary_emb.inv_freq.mul_(0.5)  # nothing in the config tells
    ensemble = hydra.fuse(model, LATE).eval()
    with pytest.warns(UserWarning, match=r"answers differ.*host="):
        ensemble.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["host"]["library"] == "custom"
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved", host=model)
    expected = members_of(ensemble, zoo.batch("llama"))
    assert torch.equal(members_of(loaded, zoo.batch("llama")), expected)
