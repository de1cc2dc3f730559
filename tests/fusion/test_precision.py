"""Half precision: saved to the bit; novelty belongs to the precision that it was fitted in."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble
from hydra_ensembles.fusion.call_options import SummaryCollector
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
    with pytest.warns(UserWarning, match=r"logits differ.*host="):
        ensemble.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["host"]["library"] == "custom"
    loaded = HydraEnsemble.from_pretrained(tmp_path / "saved", host=model)
    expected = members_of(ensemble, zoo.batch("llama"))
    assert torch.equal(members_of(loaded, zoo.batch("llama")), expected)


# --- novelty -------------------------------------------------------------------------------------

STATES = ("float32", "bfloat16", "autocast")


def computing(state: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if state == "autocast" else nullcontext()


def quiet_images(count: int, seed: int) -> Tensor:
    """Return images that differ in brightness and contrast only, less than bfloat16 rounds."""
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    gain, shift = (0.02 * torch.randn(count, 1, 1, 1, generator=draw) for _ in range(2))
    return base * (1 + gain) + shift


def fitted_in(state: str) -> HydraEnsemble:
    ensemble = hydra.fuse(zoo.make("vit"), LATE).eval()
    if state == "bfloat16":
        ensemble.to(torch.bfloat16)
    return fit(ensemble, state, 0)


def fit(ensemble: HydraEnsemble, state: str, seed: int) -> HydraEnsemble:
    with computing(state):
        return ensemble.fit_novelty_([quiet_images(512, seed).to(ensemble.dtype)], progress=False)


@pytest.mark.parametrize("state", STATES)
def test_new_known_data_alarm_at_the_guaranteed_rate_in_every_precision(state: str) -> None:
    draws, examples = 16, 512
    ensemble, alarms = fitted_in(state), 0
    for seed in range(draws):
        fit(ensemble, state, seed)
        with computing(state):
            images = quiet_images(examples, 100 + seed).to(ensemble.dtype)
            novelty = ensemble.predict(images).novelty
        assert novelty is not None
        alarms += int((novelty > 0.95).sum())
    deviation = (0.05 * 0.95 * 2 / examples / draws) ** 0.5  # of the known data and the new
    assert alarms / (draws * examples) <= 0.05 + 2 * deviation


def test_distances_and_summaries_are_computed_in_float32_under_autocast() -> None:
    ensemble = fitted_in("float32")
    states = torch.randn(4, 17, 32, generator=torch.Generator().manual_seed(3))
    logits = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(4))

    def heard(hidden: Tensor) -> Tensor:
        collector = SummaryCollector(readout=True)
        for block in range(2):
            collector.take(block, hidden)
        collector.leave(hidden)
        return collector.summaries()

    novelty = ensemble.novelty
    assert novelty is not None
    expected = novelty(heard(states), logits)
    with torch.autocast("cpu", torch.bfloat16):
        assert heard(states).dtype == torch.float32
        found = novelty(heard(states), logits)
        similarity = novelty.explain(heard(states), logits).similarity
    assert torch.equal(found[1], expected[1])
    assert torch.equal(similarity, novelty.explain(heard(states), logits).similarity)
    half = states.bfloat16()
    assert torch.equal(heard(half), heard(half.float()))


def test_another_precision_than_the_fitted_one_is_warned_of_once(tmp_path: Path) -> None:
    ensemble = fitted_in("float32")
    images = quiet_images(4, 200)
    ensemble.predict(images)
    with computing("autocast"):
        with pytest.warns(UserWarning, match=r"fitted in float32.*autocast.*fit_novelty_"):
            ensemble.predict(images)
        ensemble.predict(images)  # warnings are errors
    ensemble.to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"fitted in float32.*bfloat16.*fit_novelty_"):
        ensemble.why_novel(images.bfloat16())
    alarms = ensemble.predict(quiet_images(64, 201).bfloat16()).novelty > 0.95
    assert alarms.double().mean() > 0.5  # of known data: what the warning is about
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="fitted in float32"):
        loaded.predict(images.bfloat16())


def test_the_fitted_precision_is_saved(tmp_path: Path) -> None:
    images = quiet_images(4, 200)
    ensemble = fitted_in("autocast")
    assert "autocast" in repr(ensemble.novelty)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    with computing("autocast"):
        expected, found = (e.predict(images).novelty_score for e in (ensemble, loaded))
    assert torch.equal(found, expected)
    with pytest.warns(UserWarning, match="fitted in float32 under autocast"):
        loaded.predict(images)
