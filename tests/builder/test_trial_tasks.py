"""`try` for labels and numbers: their own figures, examples and page; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.builder.trial import try_model
from hydra_ensembles.cli.commands.try_command import _examples, _names, _summary
from hydra_ensembles.cli.main import main
from hydra_ensembles.cli.models import Loaded
from hydra_ensembles.data import text_data
from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.report.trial_page import write_trial
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tags", "made for token classification"),
        ("questions", "made for question answering"),
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
