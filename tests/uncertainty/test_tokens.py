"""Token classification: every token is an example of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydra_ensembles import HeadMask, HydraError, build, evaluate, fuse, score_heads, verify
from hydra_ensembles.uncertainty import predict_from_logits, scores
from hydra_ensembles.uncertainty.scores import disagreement, pairwise_kl
from tests import zoo


@pytest.fixture
def logits() -> torch.Tensor:
    """Two texts, three members, four tokens, five classes."""
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) * 2


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", [*scores, "disagreement", "kl"])
def test_scores_of_tokens_are_those_of_examples(
    logits: torch.Tensor, name: str, members: int
) -> None:
    function: Any = {"disagreement": disagreement, "kl": pairwise_kl}.get(name) or scores[name]
    logits = logits[:, :members]
    if name == "neglabel":  # beside negative labels, exponentials add up to less than 1
        logits = logits.log_softmax(-1) - 0.1
    ours = function(logits)
    assert ours.shape == (2, 4)
    torch.testing.assert_close(ours.flatten(), function(flat(logits)))


def test_prediction_answers_for_every_token(logits: torch.Tensor) -> None:
    temperatures = [0.5, 1.0, 2.0]
    ours = predict_from_logits(logits, temperature=1.3, member_temperatures=temperatures)
    theirs = predict_from_logits(flat(logits), temperature=1.3, member_temperatures=temperatures)
    assert ours.probabilities.shape == (2, 4, 5)
    assert ours.uncertainty.shape == ours.class_index.shape == (2, 4)
    torch.testing.assert_close(ours.probabilities.flatten(0, 1), theirs.probabilities)
    torch.testing.assert_close(ours.uncertainty.flatten(), theirs.uncertainty)
    assert "4 tokens" in repr(ours)
    assert len(ours[1:]) == 1


class Tagger:
    """A model that answers with what it was given."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, **_: torch.Tensor) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("members", [1, 3])
def test_evaluate_counts_labelled_real_tokens(logits: torch.Tensor, members: int) -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    labels = torch.tensor([[0, -100, 2, 3], [4, 3, 2, 1]])
    keep = mask.bool() & (labels != -100)
    given = logits if members == 3 else logits[:, 0]  # one plain model has no member axis
    batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "labels": labels}
    found = evaluate(Tagger(given), [batch], progress=False)
    examples = logits[:, :members].transpose(1, 2)[keep]
    plain = evaluate(
        Tagger(examples), [{"input_ids": mask[keep], "labels": labels[keep]}], progress=False
    )
    assert found.settings["examples"] == {"id": 6}
    for key in ("cls/Acc", "cls/NLL", "cal/ECE", "cls/Brier"):
        assert found[key] == pytest.approx(plain[key])


def test_labels_of_another_length_are_named(logits: torch.Tensor) -> None:
    batch = {"input_ids": torch.ones(2, 4), "labels": torch.zeros(2, 3, dtype=torch.long)}
    with pytest.raises(HydraError, match="per token"):
        evaluate(Tagger(logits), [batch], progress=False)


def test_a_fused_tagger_answers_and_is_evaluated_by_token() -> None:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = zoo.batch("bert")
    rows = [[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]
    masks = [HeadMask([[1] * 4, [1] * 4, row]) for row in rows]
    ensemble = fuse(model, masks)
    verify(ensemble, batch, tolerance=1e-4)
    assert ensemble.member_logits(batch).shape == (4, 3, 7, 5)
    answer = ensemble.predict(batch)
    assert answer.uncertainty.shape == (4, 7)
    labels = answer.class_index.masked_fill(batch["attention_mask"] == 0, -100)
    output = ensemble(**batch, labels=labels)
    real = labels != -100
    expected = torch.nn.functional.nll_loss(output.logits[real], labels[real])
    torch.testing.assert_close(output.loss, expected)
    found = evaluate(ensemble, [{**batch, "labels": labels}], progress=False)
    assert found["cls/Acc"] == 1.0
    assert found.settings["examples"] == {"id": int(real.sum())}


def test_a_tagger_is_built_or_made_by_scores() -> None:
    from transformers import BertConfig, BertForTokenClassification

    def make() -> torch.nn.Module:
        return BertForTokenClassification(BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5))

    model = zoo.seeded(make)
    data = []
    for seed, length in enumerate((5, 7, 6, 7)):  # batches of texts of different lengths
        batch = {k: v[:, :length] for k, v in zoo.batch("bert", size=10, seed=seed).items()}
        labels = model(**batch).logits.argmax(-1)
        data.append({**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)})
    built = build(model, data, members=2, method="select", progress=False)
    assert built.task.name == "token-classification" and built.novelty is not None
    masks = [
        score_heads(model, [batch], progress=False).top_k([4, 4, 2], scope="layer")
        for batch in data[:2]
    ]
    ensemble = fuse(model, masks)
    assert ensemble.member_logits(data[0]).shape == (10, 2, 5, 5)
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in data)
    assert evaluate(ensemble, data, progress=False).settings["examples"] == {"id": tokens}


@pytest.mark.parametrize("trunk", [0, 2])
def test_the_novelty_of_a_text_does_not_see_padding(trunk: int) -> None:
    from transformers import BertConfig, BertForTokenClassification

    def build() -> torch.nn.Module:
        return BertForTokenClassification(BertConfig(**zoo.SIZES, **zoo.TEXT, num_labels=5))

    model = zoo.seeded(build)
    full = [[1] * zoo.HEADS] * trunk
    rest = [[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 0, 1, 1]]]
    ensemble = fuse(model, [HeadMask([*full, *row * (zoo.LAYERS - trunk)]) for row in rest])
    assert ensemble.plan.trunk == trunk
    known = zoo.batch("bert", size=40)
    labels = torch.zeros_like(known["input_ids"])
    ensemble.fit_novelty_([{**known, "labels": labels}], progress=False)
    batch = zoo.batch("bert", size=4, seed=9)
    answer = ensemble.predict(batch)
    assert answer.novelty.shape == (4,) and answer.uncertainty.shape == (4, 7)
    longer = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in batch.items()}
    torch.testing.assert_close(
        ensemble.predict(longer).novelty_score, answer.novelty_score, atol=1e-4, rtol=1e-4
    )
    assert ensemble.why_novel(batch).surprise.shape[0] == 4
