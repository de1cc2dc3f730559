"""`try` for every task that is judged: its own figures, examples and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles.builder.trial import try_model
from hydra_ensembles.cli.commands.try_command import _examples, _names, _summary
from hydra_ensembles.cli.main import main
from hydra_ensembles.cli.models import Loaded
from hydra_ensembles.data import load_data, split, text_data
from hydra_ensembles.data.batches import labels_of
from hydra_ensembles.data.task_data import QuestionBatches, TokenBatches
from hydra_ensembles.errors import DataError, MaskError, UnsupportedModelError
from hydra_ensembles.report.trial_page import write_trial
from hydra_ensembles.tasks import task_of
from tests.tasks import test_task_doors as doors
from tests.tasks.test_tasks import fast_tokenizer, host

WORDS = ["who", "saw", "ann", "lee", "in", "rome"]
QUICK = {"members": 2, "max_cost": 2.0, "risk": 0.9, "alarm": 0.2, "progress": False}


def texts(name: str, count: int = 80, *, labels: bool = True) -> Any:
    """Return texts with the host's own answers as labels, some of them changed."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(WORDS), (count, 6), generator=generator).tolist()
    written = [" ".join(WORDS[i] for i in row[: 3 + row[0] % 4]) for row in draws]
    tokenizer = fast_tokenizer()
    batch = dict(tokenizer(written, padding=True, return_tensors="pt"))
    with torch.no_grad():
        outputs = host(name)(**batch).logits
    noise = torch.randn(outputs.shape, generator=generator) * outputs.std()
    given = (outputs + noise > 0).float() if name == "labels" else outputs + noise
    return text_data(written, tokenizer, labels=given if labels else None)


@pytest.mark.parametrize("name", ["labels", "numbers"])
def test_a_page_of_its_own_figures(name: str, tmp_path: Path) -> None:
    files = texts(name)
    trial = try_model(host(name), files, **QUICK)
    loaded = Loaded(trial.ensemble, name, tokenizer=files.tokenizer)
    written = _names(files)
    page = write_trial(
        tmp_path / "try.html",
        trial,
        names=written,
        examples=_examples(loaded, files, trial, written),
        title=name,
        folder="ensemble",
        kind="texts",
    ).read_text()
    summary = "\n".join(_summary(trial, written, "texts"))
    own, other = ("mAP", "RMSE") if name == "labels" else ("RMSE", "mAP")
    assert own in summary and own in page and other not in page
    assert [result.name for result in trial.results][::2] == ["your model", "Hydra"]
    if name == "labels":
        assert "micro F1" in page and "Calibration</h2>" in page and "\u2717 wrong" in page
        assert trial.policy.risk == 0.9 or trial.policy_note
    else:
        assert "Answers and true numbers" in page and " ± " in page
        assert "Furthest off" in page and "Calibration</h2>" not in page
        assert "reg/NLL" in trial.results[1].figures and trial.policy.risk is None
        assert trial.answer.sigma is not None and trial.ensemble.calibrator is not None


def test_without_labels_the_hosts_own_answers_choose() -> None:
    trial = try_model(host("labels"), texts("labels", labels=False), **QUICK)
    assert trial.labels is None and not trial.results and trial.policy.risk is None
    assert trial.answer.novelty is not None


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def tagged(count: int = 80, *, labels: bool = True) -> Any:
    """Return sentences with the host's own tags, some of them changed; or without tags."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(WORDS), (count, 6), generator=generator).tolist()
    words = [[WORDS[i] for i in row[: 3 + row[0] % 4]] for row in draws]
    tokenizer, model = fast_tokenizer(), host("tags")
    tags = []
    for text in words:
        batch = tokenizer([text], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            said = model(**batch).logits[0, 1:-1].argmax(-1)
        other = torch.randint(5, said.shape, generator=generator)
        tags.append(torch.where(torch.rand(said.shape, generator=generator) < 0.3, other, said))
    padded = torch.nn.utils.rnn.pad_sequence(tags, batch_first=True, padding_value=-100)
    return TokenBatches(words, tokenizer, tags=padded if labels else None, batch_size=16)


def asked(count: int = 60) -> Any:
    """Return questions whose answers are the host's own, or another word of the text."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(WORDS), (count, 7), generator=generator).tolist()
    texts = [" ".join(WORDS[i] for i in row[: 4 + row[0] % 4]) for row in draws]
    characters = []
    for row, text in enumerate(texts):
        words = text.split()
        place = row % len(words)
        first = sum(len(word) + 1 for word in words[:place])
        characters.append([first, first + len(words[place])] if row % 3 else [-1, -1])
    questions = ["who saw rome"] * count
    given = torch.tensor(characters)
    return QuestionBatches(questions, texts, fast_tokenizer(), answers=given, batch_size=16)


@pytest.fixture
def named_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host("tags").config, "id2label", dict(enumerate(TAGS)))


@pytest.mark.parametrize("name", ["tags", "questions"])
def test_tokens_and_spans_are_judged_by_text(name: str, tmp_path: Path, named_tags: None) -> None:
    files = tagged() if name == "tags" else asked()
    trial = try_model(host(name), files, **{**QUICK, "members": 2})
    count = files.count
    assert trial.uncertainty.shape == trial.wrong.shape == (count,) == trial.held_out.shape
    ensemble, start = trial.ensemble, 0
    for batch in files:
        rows = range(start, start + len(batch["input_ids"]))
        part = trial.answer[torch.tensor(rows)]
        if name == "questions":  # without temperatures: as the saved ensemble says
            own = ensemble.predict(batch)
            errors = ensemble.task.errors(own, labels_of(batch))
            assert torch.equal(errors, trial.wrong[rows.start : rows.stop])
            assert torch.equal(own.start, part.start) and torch.equal(own.end, part.end)
        else:
            counted = [row.nonzero().flatten().tolist() for row in batch["labels"] != -100]
            assert [row.nonzero().flatten().tolist() for row in part.real] == counted
        start = rows.stop
    figures = trial.results[-1]
    page = write_page(trial, files, tmp_path)
    assert trial.policy.alarm == 0.2 and trial.answer.code.shape == trial.answer.uncertainty.shape
    if name == "tags":
        right = trial.answer.class_index == dense(files, trial.answer.real)
        held = trial.answer.real & trial.held_out[:, None]
        assert figures["cls/Acc"] == pytest.approx(float(right[held].double().mean()))
        assert torch.equal(trial.wrong, (~right & trial.answer.real).any(1))
        assert "F1 of entities" in page and "of the texts called new" in page
        assert [result.name for result in trial.results][1] == "your model + temperature"
    else:
        assert figures["cls/Acc"] == float((~trial.wrong[trial.held_out]).double().mean())
        assert "exact answers" in page and '"context": "..."' in page
        assert [result.name for result in trial.results] == ["your model", "Hydra"]
        assert "each with" not in page and trial.calibration == {}


def dense(files: Any, real: torch.Tensor) -> torch.Tensor:
    """The tags of all texts, as wide as the longest."""
    rows = [row for batch in files for row in batch["labels"]]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return torch.nn.functional.pad(padded, (0, real.shape[1] - padded.shape[1]), value=-100)


def write_page(trial: Any, files: Any, folder: Path) -> str:
    loaded = Loaded(trial.ensemble, "tiny", tokenizer=files.tokenizer, class_names=TAGS)
    written = _names(files)
    summary = "\n".join(_summary(trial, written, "texts"))
    assert "held-out texts" in summary or not trial.results
    return write_trial(
        folder / "try.html",
        trial,
        names=written,
        examples=_examples(loaded, files, trial, written),
        title="tiny",
        folder="ensemble",
        kind="texts",
    ).read_text()


def test_tags_of_plain_sentences_are_the_hosts_own(tmp_path: Path, named_tags: None) -> None:
    trial = try_model(host("tags"), tagged(labels=False), **QUICK)
    assert trial.labels is None and trial.wrong is None and trial.policy.risk is None
    assert trial.answer.code is not None and trial.answer.novelty is not None
    assert "Least certain" not in write_page(trial, tagged(labels=False), tmp_path)
    left = tagged()
    left.tokenizer.padding_side = "left"
    with pytest.raises(DataError, match="padding on the right"):
        try_model(host("tags"), left, **QUICK)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("encoder", "made for embeddings"),
    ],
)
def test_other_tasks_are_refused_first(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        try_model(host(name), [])
    host(name).save_pretrained(tmp_path / "model")
    next((tmp_path / "model").glob("*.safetensors")).unlink()  # its weights are not read
    (tmp_path / "data.txt").write_text("who saw rome\n")
    arguments = ["try", str(tmp_path / "model"), "--data", str(tmp_path / "data.txt")]
    assert main(arguments) == 4
    assert words in capsys.readouterr().err


def table(name: str, count: int = 80) -> str:
    """Return rows of tagged words, or of questions of which every third has no answer."""
    generator = torch.Generator().manual_seed(0)
    tags = {"ann": "B-PER", "lee": "I-PER", "rome": "B-LOC"}
    rows: list[dict[str, Any]] = []
    for place, draw in enumerate(torch.randint(6, (count, 6), generator=generator).tolist()):
        words = [WORDS[i] for i in draw[: 3 + draw[0] % 4]]
        if name == "tags":
            rows.append({"tokens": words, "tags": [tags.get(word, "O") for word in words]})
            continue
        text, first = " ".join(words), words[place % len(words)]
        answer = "" if place % 3 == 0 else first
        rows.append({"question": "who", "context": text, "answer": answer})
        rows[-1]["answer_start"] = text.index(answer)
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize("name", ["tags", "questions"])
def test_tags_and_spans_have_a_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    doors.host(name).save_pretrained(model)
    fast_tokenizer().save_pretrained(model)
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(table(name))
    options = ["--members", "2", "--max-cost", "2", "--risk", "0.95", "--alarm", "0.2"]
    asked = ["try", str(model), "--data", str(data), "-o", str(out), *options, "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    page = (out / "try.html").read_text()
    shown = ("entity F1", "NLL") if name == "tags" else ("exact match", "answer F1")
    assert all(figure in page for figure in shown) and "The strangest" in page
    calibrated = ["your model + temperature"] if name == "tags" else []
    assert list(found["held_out"]) == ["your model", *calibrated, "Hydra"]
    assert ("Calibration</h2>" in page) == (name == "tags")
    key = "ent/F1" if name == "tags" else "qa/EM"
    assert all(key in figures for figures in found["held_out"].values())
    assert len(found["novelty"]) == len(found["uncertainty"]) == 80
    made = HydraEnsemble.from_pretrained(out / "ensemble")
    assert made.policy is not None and made.novelty is not None and made.members == 2


def test_figures_of_tags_are_those_of_evaluate(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(table("tags"))
    model = doors.host("tags")
    files = load_data(data, tokenizer=fast_tokenizer(), task=task_of(model), class_names=doors.TAGS)
    trial = try_model(model, files, **QUICK)
    rows = trial.held_out.nonzero().flatten().tolist()
    plain = hydra.evaluate(model, files.subset(rows), bootstrap=0, progress=False)
    first = trial.results[0]
    for key in ("cls/NLL", "cls/Acc", "ent/F1", "cal/ECE"):
        assert first[key] == pytest.approx(plain[key], abs=1e-6), key


def test_one_member_is_taken_where_heads_have_no_room(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(table("tags"))
    model = doors.host("tags")
    files = load_data(data, tokenizer=fast_tokenizer(), task=task_of(model), class_names=doors.TAGS)
    options: dict[str, Any] = {"max_cost": 1.01, "novelty": False, "progress": False}
    made = hydra.build(model, files, **options)
    assert made.members == 1 and made.record["auto"]["chosen"] == "one"
    assert "leaves no room for 3 members" in made.record["auto"]["why"]
    with pytest.raises(MaskError, match="leaves no room"):
        hydra.build(model, files, members=3, **options)


def test_tags_of_any_length_are_split() -> None:
    batches = [
        {**fast_tokenizer()([text] * 2, return_tensors="pt")} for text in ("who saw", "ann lee saw")
    ]
    for batch in batches:
        batch["labels"] = torch.zeros_like(batch["input_ids"])
    parts = split(batches, {"a": 0.5, "b": 0.5})
    assert [part.count for part in parts.values()] == [2, 2]
