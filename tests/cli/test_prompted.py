"""A prompted language model on the command line: its template is never left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.cli.main import main
from hydra_ensembles.cli.models import load_model, load_set
from hydra_ensembles.data import text_data
from hydra_ensembles.errors import DataError
from tests.serving.export.conftest import tokenizer

TEXTS = ["a joy to watch", "no plot", "fine!", "watch a fine plot"]
LABELS = [1, 0, 1, 0]


def prompted() -> hydra.PromptClassifier:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=40,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    labels = {"bad": "no", "good": "joy"}
    return hydra.PromptClassifier(model, tokenizer(), "a plot to watch {} ! a", labels)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[hydra.HydraEnsemble, Path]:
    host = prompted()
    rows = [[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]
    ensemble = hydra.fuse(host, [hydra.HeadMask([[1] * 4, [1] * 4, row]) for row in rows])
    folder = tmp_path_factory.mktemp("prompted")
    ensemble.save_pretrained(folder / "ensemble")
    lines = [f"{text}\t{name}" for text, name in zip(TEXTS, LABELS, strict=True)]
    (folder / "texts.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    return ensemble, folder


def test_predict_asks_by_the_prompt(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ensemble, folder = saved
    texts = folder / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n")
    assert main(["predict", str(folder / "ensemble"), str(texts)]) == 0
    told = [json.loads(line)["confidence"] for line in capsys.readouterr().out.splitlines()]
    expected = ensemble.predict(TEXTS).confidence
    torch.testing.assert_close(torch.tensor(told), expected, atol=1e-5, rtol=0)
    without = dict(ensemble.tokenizer(TEXTS, padding=True, return_tensors="pt"))
    without.pop("token_type_ids", None)
    assert (ensemble.predict(without).confidence - expected).abs().max() > 1e-3


def test_data_is_prompted(saved: Any) -> None:
    ensemble, folder = saved
    loaded = load_model(str(folder / "ensemble"))
    data = load_set(loaded, str(folder / "texts.tsv"))
    found = hydra.evaluate(loaded.model, data)["cls/NLL"]
    chosen = ensemble.predict(TEXTS).probabilities[range(len(LABELS)), LABELS]
    assert float(found) == pytest.approx(float(-chosen.log().mean()), abs=1e-5)


def test_texts_without_the_prompt_are_refused(saved: Any) -> None:
    ensemble, _ = saved
    host = prompted()
    plain = text_data(TEXTS, tokenizer(), labels=LABELS)
    with pytest.raises(DataError, match="without the prompt"):
        hydra.evaluate(ensemble, plain)
    with pytest.raises(DataError, match=r"classifier\.prompts"):
        hydra.score_heads(host, plain)
    with pytest.raises(DataError, match=r"classifier\.prompts"):
        hydra.build(host, plain)
    right = text_data(TEXTS, host.prompts, labels=LABELS)
    assert float(hydra.evaluate(host, right)["cls/NLL"]) > 0


def test_proxies_leave_the_prompt_alone() -> None:
    host = prompted()
    prompt = set(host.encode([""])["input_ids"][0].tolist())
    assert prompt <= {*host.prompts.all_special_ids, *tokenizer().all_special_ids}
    with pytest.raises(DataError, match="in pairs"):
        host.prompts(TEXTS, TEXTS)
    with pytest.raises(DataError, match=r"classifier\.max_length"):
        host.prompts(TEXTS, max_length=7)
