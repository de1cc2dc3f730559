"""Every task: fused == one by one, saved == loaded, the host's own loss, any size of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles.data.batches import labels_of, main_output
from hydra_ensembles.errors import DataError, HydraError, UnsupportedModelError
from hydra_ensembles.prediction import join
from hydra_ensembles.tasks import Embedding, MultiLabel, Regression, Task, as_task, task_of, tasks
from tests import zoo
from tests.fusion.test_fusion import EARLY


def bert(kind: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        config = transformers.BertConfig(**zoo.SIZES, **zoo.TEXT, **options)
        return getattr(transformers, kind)(config)

    return make


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=99, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def images(**options: Any) -> torch.nn.Module:
    return zoo._vit(num_labels=1, **options)


SEQUENCE = "BertForSequenceClassification"
HOSTS: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "classes": ("multi-class", bert(SEQUENCE, num_labels=5)),
    "labels": (
        "multi-label",
        bert(SEQUENCE, num_labels=4, problem_type="multi_label_classification"),
    ),
    "number": ("regression", bert(SEQUENCE, num_labels=1)),
    "numbers": ("regression", bert(SEQUENCE, num_labels=3, problem_type="regression")),
    "image number": ("regression", images),
    "tags": ("token-classification", bert("BertForTokenClassification", num_labels=5)),
    "masked words": ("token-classification", bert("BertForMaskedLM")),
    "next words": ("next-token", gpt2),
    "questions": ("question-answering", bert("BertForQuestionAnswering")),
    "encoder": ("embedding", bert("BertModel")),
}
LABELLED = [name for name in HOSTS if name != "encoder"]


@cache
def host(name: str) -> torch.nn.Module:
    return zoo.seeded(HOSTS[name][1])


@cache
def fused(name: str) -> HydraEnsemble:
    return hydra.fuse(host(name), EARLY)


def inputs(name: str, size: int = 4, seed: int = 1) -> dict[str, torch.Tensor]:
    if name == "image number":
        return {"pixel_values": zoo.batch("vit", size=size, seed=seed)}
    if name == "questions":
        batch = zoo.batch("bert", size=size, seed=seed)
        types = (torch.arange(7) > 1).long().repeat(size, 1) * batch["attention_mask"]
        return {**batch, "token_type_ids": types}
    return dict(zoo.batch("bert", size=size, seed=seed))


def labels(name: str, size: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "labels":
        return {"labels": torch.randint(0, 2, (size, 4), generator=generator).float()}
    if "number" in name:
        count = 3 if name == "numbers" else 1
        numbers = torch.randn(size, count, generator=generator)
        return {"labels": numbers if count > 1 else numbers[:, 0]}
    if name == "classes":
        return {"labels": torch.arange(size) % 5}
    if name == "questions":  # the last one was cut off
        ends = torch.tensor([3, 4, 2, 7])[torch.arange(size) % 4]
        return {"start_positions": torch.full((size,), 2), "end_positions": ends}
    batch = inputs(name, size)
    words = torch.randint(0, 5, batch["input_ids"].shape, generator=generator)
    return {"labels": words.masked_fill(batch["attention_mask"] == 0, -100)}


def shown(output: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", HOSTS)
def test_the_task_is_found_and_kept(name: str, tmp_path: Path) -> None:
    ensemble = fused(name)
    assert ensemble.task.name == HOSTS[name][0] == task_of(host(name)).name
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.task == ensemble.task and loaded.score == ensemble.score
    ours, theirs = ensemble.predict(inputs(name)), loaded.predict(inputs(name))
    assert type(ours) is type(theirs) is ensemble.task.prediction
    for column, value in ours._columns().items():
        assert torch.equal(value, getattr(theirs, column)), column


@pytest.mark.parametrize("name", HOSTS)
def test_fused_equals_the_members_one_by_one(name: str) -> None:
    ensemble, batch = fused(name), inputs(name)
    hydra.verify(ensemble, batch, tolerance=1e-4)
    with torch.no_grad():
        outputs = [shown(ensemble.member(m)(**batch)) for m in range(3)]
        ours = shown(ensemble(**batch))
    expected = ensemble.task.mean(torch.stack([read(name)(output) for output in outputs], 1))
    torch.testing.assert_close(read(name)(ours), expected, atol=1e-4, rtol=1e-4)
    fields = {field for names in ensemble.task.fields for field in names}
    assert set(ours) == fields & set(outputs[0])


def read(name: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    return lambda output: main_output(output, task_of(host(name)).fields)


@pytest.mark.parametrize("name", LABELLED)
def test_the_loss_of_one_member_is_the_hosts_own(name: str) -> None:
    model, batch, given = host(name), inputs(name), labels(name)
    one = hydra.fuse(model, [hydra.HeadMask.full(model)])
    with torch.no_grad():
        expected, ours = model(**batch, **given), one(**batch, **given)
    torch.testing.assert_close(ours.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert type(ours) is type(expected)
    plain = one(**batch, **given, return_dict=False)
    torch.testing.assert_close(plain[0], ours.loss)


@pytest.mark.parametrize("name", LABELLED)
def test_the_loss_is_that_of_the_mean(name: str) -> None:
    ensemble, batch, given = fused(name), inputs(name), labels(name)
    output = ensemble(**batch, **given)
    mean = ensemble.task.mean(ensemble.member_logits(batch))
    checked = ensemble.task.check_labels(labels_of(given), "the test")
    losses = ensemble.task.losses(mean, checked, batch.get("attention_mask"))
    assert losses.shape == (4,)
    if not ensemble.task.by_token and name != "questions":  # the mean is over what counts
        torch.testing.assert_close(output.loss, losses.mean())
    output.loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in ensemble.parameters())
    ensemble.zero_grad()


@pytest.mark.parametrize("name", HOSTS)
def test_answers_do_not_depend_on_the_batch(name: str) -> None:
    ensemble, batch = fused(name), inputs(name, size=8)
    whole = ensemble.predict(batch)
    for row in range(8):
        one = ensemble.predict({key: value[row : row + 1] for key, value in batch.items()})
        for column, value in whole[row]._columns().items():
            if value.dtype.is_floating_point:
                torch.testing.assert_close(getattr(one, column), value, atol=1e-4, rtol=1e-4)
    if whole.uncertainty.ndim == 1:
        assert len(whole.rows()) == len(repr(whole).splitlines()) - 2 == 8
        assert list(whole.rows()[0]) == list(type(whole).FIELDS)


@pytest.mark.parametrize("name", HOSTS)
def test_novelty_and_a_policy_for_every_task(name: str) -> None:
    ensemble = hydra.fuse(host(name), EARLY)
    ensemble.fit_novelty_([inputs(name, size=40, seed=2)], progress=False)
    policy = hydra.fit_policy(
        ensemble, [inputs(name, size=40, seed=5)], risk=None, alarm=0.1, progress=False
    )
    answer = ensemble.predict(inputs(name))
    assert answer.novelty.shape == (4,) and answer.code.shape == answer.uncertainty.shape
    assert policy.score == ensemble.task.default_score
    if isinstance(ensemble.task, Regression):
        with pytest.raises(DataError, match="tolerance"):
            hydra.fit_policy(ensemble, [{**inputs(name), **labels(name)}], progress=False)
        ensemble.task = Regression(tolerance=100.0)
    if name in LABELLED and name != "next words":  # nobody guesses those of a random model
        held_out = [{**inputs(name, size=60, seed=6), **labels(name, size=60)}]
        policy = hydra.fit_policy(ensemble, held_out, risk=0.995, progress=False)
        assert policy.measured is not None and policy.alarm == 0.05
    ensemble.why_novel(inputs(name))


def test_several_labels_and_their_thresholds() -> None:
    ensemble, batch = hydra.fuse(host("labels"), EARLY), inputs("labels")
    answer = ensemble.predict(batch)
    sigmoids = ensemble.member_logits(batch).sigmoid()
    torch.testing.assert_close(answer.probabilities, sigmoids.mean(1))
    assert torch.equal(answer.active, answer.probabilities >= 0.5)
    row = answer.rows(probabilities=True)[0]
    assert row["class"] == [i for i, p in enumerate(row["probabilities"]) if p >= 0.5]
    assert row["label"] == [f"LABEL_{i}" for i in row["class"]]
    ensemble.task = MultiLabel(thresholds=(0.0, 1.1, 0.5, 0.5))
    changed = ensemble.predict(batch)
    assert bool(changed.active[:, 0].all()) and not bool(changed.active[:, 1].any())
    ensemble.temperature = 2.0
    torch.testing.assert_close(
        ensemble.predict(batch).probabilities, (ensemble.member_logits(batch) / 2).sigmoid().mean(1)
    )
    assert ensemble.task.errors(changed, changed.active.float()).sum() == 0
    votes = changed.active.clone().float()
    votes[2, 3] = 1 - votes[2, 3]
    assert ensemble.task.errors(changed, votes).tolist() == [False, False, True, False]


def test_numbers_and_their_spread() -> None:
    ensemble, batch = fused("numbers"), inputs("numbers")
    answer, members = ensemble.predict(batch), ensemble.member_logits(batch)
    torch.testing.assert_close(answer.values, members.mean(1))
    torch.testing.assert_close(answer.spread, members.std(1, correction=0))
    assert len(answer.rows()[0]["value"]) == 3
    assert isinstance(fused("number").predict(inputs("number")).rows()[0]["value"], float)
    with pytest.raises(HydraError, match="no temperatures"):
        ensemble.temperature = 2.0
    with pytest.raises(AttributeError, match="values, spread"):
        answer.probabilities  # noqa: B018


def test_an_encoder_gives_its_host_s_output() -> None:
    ensemble, batch = fused("encoder"), inputs("encoder")
    with torch.no_grad():
        expected = host("encoder")(**batch)
        ours = ensemble(**batch)
    assert ours.last_hidden_state.shape == expected.last_hidden_state.shape
    assert ours.pooler_output.shape == expected.pooler_output.shape
    answer = ensemble.predict(batch)
    torch.testing.assert_close(answer.embedding, ours.pooler_output)
    mean = hydra.fuse(host("encoder"), EARLY, task=Embedding(pooling="mean", pooler=True))
    mask = batch["attention_mask"][:, :, None].float()
    by_hand = (ours.last_hidden_state * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(mean.predict(batch).embedding, by_hand, atol=1e-5, rtol=1e-5)
    with pytest.raises(UnsupportedModelError, match="no classes"):
        ensemble(**batch, labels=torch.zeros(4))


def fast_tokenizer() -> Any:
    """A real tokenizer that knows where its tokens are."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "who", "saw", "ann", "lee", "in", "rome", "##s"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )


def test_entities_have_places_in_the_text() -> None:
    ensemble = hydra.fuse(host("tags"), EARLY)
    ensemble.tokenizer = fast_tokenizer()
    ensemble.id2label = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    texts = ["ann lees saw rome", "who"]
    answer = ensemble.predict(texts)
    # one tag per token: [CLS] ann lee ##s saw rome [SEP]
    answer = replace(
        answer, class_index=torch.tensor([[1, 1, 2, 4, 0, 3, 1], [3, 0, 3, 0, 0, 0, 0]])
    )
    assert answer.real.sum(1).tolist() == [5, 1]
    assert answer.words[0].tolist() == [-1, 0, 1, 1, 2, 3, -1]
    first, second = answer.entities
    assert [(e["label"], e["text"], e["start"], e["end"]) for e in first] == [
        ("PER", "ann lees", 0, 8),
        ("LOC", "rome", 13, 17),
    ]
    assert second == []
    row = answer.rows()[0]
    assert row["label"] == ["B-PER", "I-PER", "I-LOC", "O", "B-LOC"]
    assert row["entities"][0]["confidence"] == pytest.approx(
        float(answer.confidence[0, 1:3].min()), abs=1e-6
    )
    assert answer[1].texts == ["who"] and join([answer[0], answer[1]]).texts == texts


def test_spans_are_the_best_of_all_and_have_a_text() -> None:
    ensemble = hydra.fuse(host("questions"), EARLY)
    ensemble.tokenizer = fast_tokenizer()
    asked = {"question": "who saw rome", "context": "ann lees saw rome in rome"}
    answer = ensemble.predict([asked, asked])
    # [CLS] who saw rome [SEP] ann lee ##s saw rome in rome [SEP]
    assert answer.able[0].tolist() == [False] * 5 + [True] * 7 + [False]
    logits = answer.member_logits[0]
    best, total = {}, torch.zeros(3)
    for start in range(13):
        for end in range(start, 13):
            if (start, end) == (0, 0) or (start >= 5 and end <= 11):
                best[start, end] = (logits[:, 0, start] + logits[:, 1, end]).exp()
                total += best[start, end]
    chances = {span: float((value / total).mean()) for span, value in best.items()}
    span = max(chances, key=chances.__getitem__)
    assert (int(answer.start[0]), int(answer.end[0])) == span
    assert float(answer.confidence[0]) == pytest.approx(chances[span], rel=1e-4)
    assert float(answer.no_answer[0]) == pytest.approx(chances[0, 0], rel=1e-4)
    words = ["ann", "lee", "s", "saw", "rome", "in", "rome"]
    shown = answer.rows()[0]["answer"]
    if span == (0, 0):
        assert shown == ""
    else:
        assert shown.startswith(words[span[0] - 5]) and shown.endswith(words[span[1] - 5])
    with pytest.raises(DataError, match="question"):
        ensemble.predict(["who saw rome"])


def test_a_task_can_be_given() -> None:
    model = zoo.host("vit")  # its config does not say that labels are several
    ensemble = hydra.fuse(model, EARLY, task="multi-label")
    images = zoo.batch("vit")
    torch.testing.assert_close(
        ensemble.predict(images).probabilities, ensemble.member_logits(images).sigmoid().mean(1)
    )
    with pytest.raises(UnsupportedModelError, match="different outputs"):
        hydra.fuse(model, EARLY, task="embedding")
    with pytest.raises(HydraError, match="Did you mean"):
        hydra.fuse(model, EARLY, task="multilabel")
    with pytest.raises(DataError, match="pass task="):
        hydra.evaluate(
            fused("classes"), [{**inputs("classes"), **labels("labels")}], progress=False
        )


def test_a_task_survives_plain_data() -> None:
    for task in (Regression(tolerance=0.5), MultiLabel(thresholds=(0.1, 0.9)), Embedding("first")):
        assert as_task(task.to_dict()) == task
    assert isinstance(as_task("regression"), Task) and "regression" in tasks


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("SegformerForSemanticSegmentation", "segmentation"),
        ("DetrForObjectDetection", "object detection"),
        ("Wav2Vec2ForCTC", "speech recognition"),
        ("WhisperForConditionalGeneration", "speech recognition"),
        ("T5ForConditionalGeneration", "generation"),
        ("DPTForDepthEstimation", "depth estimation"),
        ("TapasForQuestionAnswering", "tables"),
    ],
)
def test_other_tasks_are_refused_by_their_names(kind: str, task: str) -> None:
    model = type(kind, (torch.nn.Module,), {})()
    explanation = hydra.explain(model)
    assert not explanation.supported and task in explanation.reason
    with pytest.raises(UnsupportedModelError, match=task):
        hydra.fuse(model, EARLY)


@pytest.mark.parametrize("name", ["labels", "number", "numbers", "questions", "tags"])
def test_every_labelled_task_is_evaluated(name: str) -> None:
    ensemble = hydra.fuse(host(name), EARLY)
    ensemble.fit_novelty_([inputs(name, size=40, seed=2)], progress=False)
    data = [{**inputs(name, size=12), **labels(name, size=12)}]
    far = [inputs(name, size=9, seed=7)]
    results = hydra.evaluate(ensemble, data, ood={"far": far}, bootstrap=20, progress=False)
    answer = ensemble.predict(inputs(name, size=12))
    given = labels_of(labels(name, size=12))
    assert given is not None
    if name == "labels":
        assert results["cls/Acc"] == float((answer.active == given.bool()).all(1).float().mean())
    if "number" in name:
        error = answer.values - given.reshape(answer.values.shape)
        assert results["reg/MAE"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    if name == "questions":
        exact = (answer.start == given[:, 0]) & (answer.end == given[:, 1])
        assert results["cls/Acc"] == float(exact.float().mean())
    assert 0 <= results["ood/far/AUROC"] <= 1
    if name != "tags":  # novelty is of texts
        assert "novelty/Alarms_5" in results and "ood/far/novelty/AUROC" in results


def maps(kind: str) -> torch.nn.Module:
    """An image encoder whose states are a map, with and without a pooled output."""
    if kind == "segformer":
        config = transformers.SegformerConfig(
            hidden_sizes=[16, 16, 32, 32],
            num_attention_heads=[1, 2, 4, 4],
            depths=[1, 1, 1, 2],
            sr_ratios=[1, 1, 1, 1],
        )
        return transformers.SegformerModel(config)
    config = transformers.MobileViTConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 24],
        num_attention_heads=4,
    )
    return transformers.MobileViTModel(config)


@pytest.mark.parametrize("kind", ["segformer", "mobilevit"])
def test_a_map_of_features_is_read_as_tokens(kind: str) -> None:
    model = zoo.seeded(lambda: maps(kind))
    masks = [hydra.HeadMask.random(model, keep=0.5, seed=seed) for seed in range(2)]
    ensemble = hydra.fuse(model, masks)
    images = {"pixel_values": torch.randn(3, 3, 64, 64)}
    with torch.no_grad():
        own, members = ensemble(**images), [ensemble.member(m)(**images) for m in range(2)]
    expected = torch.stack([output.last_hidden_state for output in members]).mean(0)
    assert expected.ndim == 4
    torch.testing.assert_close(own.last_hidden_state, expected, atol=1e-4, rtol=1e-4)
    answer = ensemble.predict(images)
    if ensemble.task.pooler:
        torch.testing.assert_close(answer.embedding, own.pooler_output)
    else:
        torch.testing.assert_close(answer.embedding, expected.mean((2, 3)), atol=1e-4, rtol=1e-4)
