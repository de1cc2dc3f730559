"""`try` for every task: its own figures, examples and page; what is never wrong is refused."""

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


def test_tags_need_labels(tmp_path: Path) -> None:
    batches = [dict(fast_tokenizer()(["who saw rome"] * 50, return_tensors="pt"))]
    with pytest.raises(DataError, match="no labels in your data, which a try of token"):
        try_model(doors.host("tags"), batches)


def test_what_is_never_wrong_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "made for embeddings"
    with pytest.raises(UnsupportedModelError, match=words):
        try_model(host("encoder"), [])
    host("encoder").save_pretrained(tmp_path / "model")
    next((tmp_path / "model").glob("*.safetensors")).unlink()  # its weights are not read
    (tmp_path / "data.txt").write_text("who saw rome\n")
    arguments = ["try", str(tmp_path / "model"), "--data", str(tmp_path / "data.txt")]
    assert main(arguments) == 4
    assert words in capsys.readouterr().err


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
