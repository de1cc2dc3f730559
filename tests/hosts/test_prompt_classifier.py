"""A causal language model as a zero-shot classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles.hosts.architecture import describe_host, rebuild_host

SIZES = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEMPLATE = "say {} is"


class Letters:
    """A real, small tokenizer: one token per letter, a start token if asked for."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [3 + (ord(letter) % 36) for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def language_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, **SIZES))
    else:
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            **SIZES,
        )
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return language_model(request.param)


def by_hand(model: Any, prompt: list[int], label: list[int]) -> float:
    """log P(label | prompt), one forward pass over the whole text."""
    scores = model(torch.tensor([prompt + label])).logits[0].log_softmax(-1)
    return sum(float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(label))


@pytest.mark.parametrize("labels", [["a", "b", "c"], ["ab", "c", "abc"]])
@torch.no_grad()
def test_logits_are_the_labels_log_probabilities(model: nn.Module, labels: list[str]) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, labels)
    texts = ["x", "a longer one", "mid"]
    logits = host(**host.encode(texts)).logits
    tokens = Letters()
    expected = [
        [
            by_hand(
                model,
                tokens(TEMPLATE.format(text))["input_ids"],
                tokens(label, add_special_tokens=False)["input_ids"],
            )
            for label in labels
        ]
        for text in texts
    ]
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_left_padding_gives_the_same(model: nn.Module) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, ["ab", "c"])
    right = host.encode(["x", "much longer"])
    room = right["attention_mask"].shape[1] - right["attention_mask"].sum(1)
    left = {
        name: torch.stack([row.roll(int(n)) for row, n in zip(value, room, strict=True)])
        for name, value in right.items()
    }
    assert not torch.equal(left["input_ids"], right["input_ids"])
    torch.testing.assert_close(host(**left).logits, host(**right).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_calibration_makes_an_empty_text_undecided(model: nn.Module) -> None:
    host = hydra.PromptClassifier(
        model, Letters(), TEMPLATE, {"yes": "ab", "no": "c"}, calibrate=True
    )
    assert host.id2label == {0: "yes", 1: "no"}
    assert host(**host.encode([""])).logits.abs().max() < 1e-5


@torch.no_grad()
def test_long_texts_are_cut_and_the_template_stays(model: nn.Module) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, ["a", "b"], max_length=20)
    ids = host.encode(["w" * 100])["input_ids"][0].tolist()
    assert len(ids) == 20
    assert ids[-3:] == Letters()(" is", add_special_tokens=False)["input_ids"]


def test_it_is_a_host(model: nn.Module) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, ["a", "b"])
    batch = host.encode(["one", "two three"])
    data = [{**batch, "labels": torch.tensor([0, 1])}]
    scores = hydra.score_heads(host, data, criterion=["his", "hies"], progress=False)
    assert scores["his"].shape == (4, 4, 4)
    assert bool((scores["his"].flat() > 0).any())
    mask = scores["hies"].top_k(0.5)
    with torch.no_grad():
        plain = host(**batch).logits
        with hydra.gate(host, mask):
            gated = host(**batch).logits
    assert not torch.allclose(plain, gated, atol=1e-4)


@torch.no_grad()
def test_it_is_built_again_by_name(model: nn.Module) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, ["ab", "c"], calibrate=True)
    twin = rebuild_host(describe_host(host))
    twin.load_state_dict(host.state_dict())
    batch = host.encode(["one", "two three"])
    torch.testing.assert_close(twin.eval()(**batch).logits, host(**batch).logits)
    with pytest.raises(hydra.HydraError, match="tokenizer"):
        twin.encode(["one"])  # type: ignore[operator]


@pytest.mark.parametrize("labels", [["a", "b"], ["ab", "c"]])
def test_it_is_fused_and_loaded(model: nn.Module, labels: list[str], tmp_path: Path) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, labels)
    batch = host.encode(["one", "two three", "four"])
    rows = [[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]
    masks = [hydra.HeadMask([[1] * 4, [1] * 4, row]) for row in rows]
    alone = []
    with torch.no_grad():
        for mask in masks:
            with hydra.gate(host, mask):
                alone.append(host(**batch).logits)
    ensemble = hydra.fuse(host, masks)
    assert ensemble.id2label == dict(enumerate(labels))
    answer = ensemble.predict(batch)
    torch.testing.assert_close(answer.member_logits, torch.stack(alone, 1), atol=1e-4, rtol=1e-4)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path).predict(batch)
    torch.testing.assert_close(loaded.member_logits, answer.member_logits, atol=1e-5, rtol=1e-5)


def test_long_rotary_positions_are_no_sizes() -> None:
    from hydra_ensembles.hosts.architecture import check_sizes

    config = {"rope_theta": 1e6, "max_position_embeddings": 131072, "eos_token_id": 200000}
    check_sizes(config, layers=3, largest=64)
    with pytest.raises(hydra.HydraError, match="hidden_size"):
        check_sizes({"hidden_size": 1e9}, layers=3, largest=64)


def test_bad_arguments_are_named(model: nn.Module) -> None:
    with pytest.raises(hydra.HydraError, match="two or more"):
        hydra.PromptClassifier(model, Letters(), TEMPLATE, ["a"])
    with pytest.raises(hydra.HydraError, match="exactly one"):
        hydra.PromptClassifier(model, Letters(), "no place", ["a", "b"])
    with pytest.raises(hydra.HydraError, match="the same"):
        hydra.PromptClassifier(model, Letters(), TEMPLATE, ["a", "a"])


def test_texts_are_put_into_the_prompt(model: nn.Module, tmp_path: Path) -> None:
    host = hydra.PromptClassifier(model, Letters(), TEMPLATE, [" yes", " no"])
    masks = [hydra.HeadMask([[1] * 4, [1] * 4, row]) for row in ([1, 0, 1, 0], [0, 1, 1, 1])]
    ensemble = hydra.fuse(host, masks)
    texts = ["one", "two three"]
    expected = ensemble.predict(host.encode(texts)).member_logits
    assert torch.equal(ensemble.predict(texts).member_logits, expected)
    ensemble.save_pretrained(tmp_path)
    loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
    loaded.tokenizer = Letters()
    torch.testing.assert_close(loaded.predict(texts).member_logits, expected)
