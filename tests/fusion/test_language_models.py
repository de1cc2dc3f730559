"""A fused causal language model scores texts; what it does not do is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble
from hydra_ensembles.errors import HydraError, UnsupportedModelError
from tests import zoo

MASKS = [
    HeadMask([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]),
    HeadMask([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]),
]
NAMES = ["gpt2", "llama"]


@pytest.mark.parametrize("name", NAMES)
def test_explain_says_what_works(name: str) -> None:
    told = str(hydra.explain(zoo.host(name)))
    assert "can be fused" in told
    for word in ("labels=", "predict", "member_logits", "PromptClassifier", "generate()"):
        assert word in told
    assert "generate" not in str(hydra.explain(zoo.host("bert")))


@pytest.mark.parametrize("name", [*NAMES, "bert"])
@pytest.mark.parametrize("engine", ["fused", "host"])
def test_generate_is_refused_and_a_member_generates(name: str, engine: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), MASKS, engine=engine).eval()
    inputs = zoo.batch(name)
    with pytest.raises(HydraError, match="generate"):
        ensemble.generate(**inputs, max_new_tokens=2)
    if name != "bert":
        texts = {key: value[:1] for key, value in inputs.items()}
        longer = ensemble.member(0).generate(
            **texts, max_new_tokens=2, do_sample=False, eos_token_id=None
        )
        assert longer.shape == (1, 9)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_those_of_the_next_token_as_in_the_host(name: str) -> None:
    model, inputs = zoo.host(name), zoo.batch(name)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    alone = hydra.fuse(model, [HeadMask.full(model)]).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            alone(**inputs, labels=labels).loss, model(**inputs, labels=labels).loss
        )
        ensemble = hydra.fuse(model, MASKS).eval()
        mean = ensemble.member_logits(inputs).softmax(-1).mean(1)
        scores = mean[:, :-1].gather(-1, labels[:, 1:, None].clamp_min(0))[..., 0].log()
        expected = -scores[labels[:, 1:] != -100].mean()
        torch.testing.assert_close(ensemble(**inputs, labels=labels).loss, expected)


@pytest.mark.parametrize("name", NAMES)
def test_predict_gives_the_next_token(name: str) -> None:
    ensemble = hydra.fuse(zoo.host(name), MASKS).eval()
    inputs = {"input_ids": zoo.batch(name)["input_ids"]}
    members = ensemble.member_logits(inputs).detach()
    answer = ensemble.predict({**inputs, "logits_to_keep": 1})
    torch.testing.assert_close(answer.probabilities[:, 0], members[:, :, -1].softmax(-1).mean(1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["fused", "host"])
def test_caches_are_refused(name: str, engine: str) -> None:
    model, ids = zoo.host(name), zoo.batch(name)["input_ids"]
    ensemble = hydra.fuse(model, MASKS, engine=engine).eval()
    with pytest.raises(UnsupportedModelError, match="use_cache"):
        ensemble(input_ids=ids, use_cache=True)
    with torch.no_grad():
        past = model(ids[:, :5], use_cache=True).past_key_values
        with pytest.raises(UnsupportedModelError, match="past_key_values"):
            ensemble(input_ids=ids[:, 5:], past_key_values=past)
        plain, asked = ensemble(input_ids=ids), ensemble(input_ids=ids, use_cache=False)
    assert plain.past_key_values is None and torch.equal(plain.logits, asked.logits)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_saved_and_loaded_without_class_names(name: str, tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host(name), MASKS).eval()
    assert ensemble.id2label is None  # transformers' two made-up names are not of tokens
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    inputs = zoo.batch(name)
    with torch.no_grad():
        assert torch.equal(loaded.member_logits(inputs), ensemble.member_logits(inputs))
