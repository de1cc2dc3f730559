"""What goes wrong ends with one helpful line and an exit code, and what was done is kept."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_ensembles.cli.main import main


def said(text: str) -> list[str]:
    """Return the lines of standard error without the signs of life that a slow machine prints."""
    return [line for line in text.strip().splitlines() if not line.endswith(" ...")]


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command that fails; return its exit code and its one line."""
    code = main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.strip().splitlines()
    # a slow machine may show a sign of life before it
    error = [line for line in lines if not line.endswith(" ...")]
    assert len(error) == 1, lines
    assert error[0].startswith("hydra-ensembles: ") and "Traceback" not in error[0]
    return code, error[0]


def started(*arguments: object, limit: int | None = None, first: str = "") -> subprocess.Popen[str]:
    """Start the command line in a process of its own, with a limit on file sizes.

    `first` is code that the process runs before the command.
    """

    def before() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job of a shell ignores it
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = f"{first}\nfrom hydra_ensembles.cli.main import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def errors_of(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a process, never leave it behind, and return the lines of its standard error."""
    with process:
        try:
            return said(process.communicate(timeout=600)[1])
        finally:
            process.kill()


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "explain", tmp_path)
    assert code == 4 and "config.json" in line


def test_a_model_that_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2, layer_type="basic"
    )
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    capsys.readouterr()  # a bar of transformers
    code, line = failure(capsys, "explain", tmp_path)
    assert code == 4 and "not supported" in line and "needs a transformer" in line


def test_an_encoder_without_a_trained_classifier(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=16,
        patch_size=8,
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    capsys.readouterr()
    code, line = failure(capsys, "build", tmp_path, "--data", shelf / "digits")
    assert code == 4 and "not in its weights" in line and "fine-tune" in line
    assert main(["explain", str(tmp_path)]) == 0
    assert "untrained pooler" in capsys.readouterr().out


def test_missing_things(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "build", shelf / "host", "--data", "/nowhere/at/all")
    assert code == 3 and "/nowhere/at/all does not exist" in line
    empty = tmp_path / "empty"
    empty.mkdir()
    code, line = failure(capsys, "build", shelf / "host", "--data", empty)
    assert code == 3 and f"The folder {empty} is empty" in line
    code, line = failure(capsys, "explain", "/nowhere/at/all")
    assert code == 3 and "no model folder" in line
    code, line = failure(capsys, "build", "--config", tmp_path / "none.yaml")
    assert code == 3 and "config file" in line
    code, line = failure(capsys, "report", tmp_path / "none")
    assert code == 3 and "does not exist" in line


def test_a_wrong_label_column(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    rows = ["file,digit"]
    for picture in sorted((shelf / "digits").rglob("*.png"))[:6]:
        shutil.copy(picture, flat / picture.name)
        rows.append(f"{picture.name},{picture.parent.name}")
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(rows))
    arguments = ("--data", flat, "--labels", table, "--label-column", "didgit")
    code, line = failure(capsys, "build", shelf / "host", *arguments, "-o", tmp_path / "out")
    assert code == 3 and "Did you mean 'digit'?" in line


def test_a_broken_image_in_the_middle(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "digits"
    shutil.copytree(shelf / "digits", folder)
    broken = sorted(folder.rglob("*.png"))[30]
    broken.write_bytes(broken.read_bytes()[:60])
    out = tmp_path / "out"
    code, line = failure(capsys, "build", shelf / "host", "--data", folder, "-o", out)
    assert code == 3 and broken.name in line and "--skip-broken" in line
    assert (out / "config.yaml").is_file()

    answers = tmp_path / "answers.jsonl"
    code, line = failure(capsys, "predict", shelf / "host", folder, "-o", answers)
    assert code == 3 and "1 of 64" in line
    lines = [json.loads(text) for text in answers.read_text().splitlines()]
    assert len(lines) == 64 and sum("error" in each for each in lines) == 1


def test_a_full_disk(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "predict", shelf / "host", shelf / "noise", "-o", "/dev/full")
    assert code == 7 and "make room" in line


def test_a_disk_that_fills_up_keeps_what_was_searched(shelf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("build", shelf / "host", "--data", shelf / "digits", "-o", out)
    process = started(*arguments, "--quiet", limit=20_000)  # the search fits, the weights do not
    error = errors_of(process)
    assert process.returncode == 7 and len(error) == 1 and "make room" in error[0], error
    assert (out / "state" / "build.json").is_file() and not (out / "config.json").exists()
    assert main([str(argument) for argument in arguments]) == 0
    assert (out / "config.json").is_file()


INTERRUPTED = """
import os, signal
from hydra_ensembles.training import loop

write = loop.write_checkpoint

def and_press_ctrl_c(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGINT)

loop.write_checkpoint = and_press_ctrl_c
"""


def test_ctrl_c(tmp_path: Path) -> None:
    process = started("demo", "-o", tmp_path, "--epochs", 2, first=INTERRUPTED)
    error = errors_of(process)
    assert process.returncode == 130
    assert f"Progress is saved in {tmp_path}" in error[-1]
    assert not any("Traceback" in line for line in error)
    assert list(tmp_path.rglob("*.safetensors")) and (tmp_path / "config.yaml").is_file()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    process = started("explain", tmp_path, "--debug")
    error = "\n".join(errors_of(process))
    assert "Traceback" in error and "UnsupportedModelError" in error


def test_wrong_usage(shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert main(["build", "--members", "0", "x", "--data", "y"]) == 2
    capsys.readouterr()
    code, line = failure(capsys, "explain", shelf / "host", "--config", _yaml(tmp_path, "jsn: 1"))
    assert code == 2 and "Did you mean 'json'?" in line
    text = "command: demo"
    code, line = failure(capsys, "explain", shelf / "host", "--config", _yaml(tmp_path, text))
    assert code == 2 and "is for `demo`" in line
    code, line = failure(capsys, "explain", shelf / "host", "--config", _yaml(tmp_path, "- 1"))
    assert code == 3
    arguments = ("--data", shelf / "digits", "--dtype", "int8")
    code, line = failure(capsys, "score", shelf / "host", *arguments)
    assert code == 2 and "float32" in line
    code, line = failure(capsys, "predict", shelf / "host", "--risk", "0.1")
    assert code == 2 and "--held-out" in line
    arguments = ("--data", shelf / "digits", "--criterion", "tailor", "-o", tmp_path)
    code, line = failure(capsys, "score", shelf / "host", *arguments)
    assert code == 2 and "taylor" in line


def test_an_ensemble_is_no_host(
    shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import hydra_ensembles as hydra

    host = hydra.HydraEnsemble.from_pretrained(shelf / "host").member(0)
    masks = [hydra.HeadMask([[1, 1, 1, 1], row]) for row in ([1, 0, 0, 0], [0, 1, 1, 0])]
    hydra.fuse(host, masks).save_pretrained(tmp_path)
    code, line = failure(capsys, "build", tmp_path, "--data", shelf / "digits")
    assert code == 4 and "already" in line
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    code, line = failure(capsys, "explain", tmp_path)
    assert code == 5 and "SHA-256" in line


HELP = "from hydra_ensembles.cli.main import main; main(['--help'])"
LIBRARIES = "import typer, rich"


def test_help_imports_little_more_than_typer() -> None:
    def imported(code: str) -> set[str]:
        code += "\nimport sys; print('\\n@', *sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return set(done.stdout.rpartition("@")[2].split())

    more = imported(HELP) - imported(LIBRARIES)
    ours = {name for name in more if name.startswith("hydra_ensembles")}
    assert len(ours) <= 8, ours
    # the rest is of typer itself, or nothing to speak of; no rich.*, yaml, torch, numpy
    rest = {n for n in more - ours if not n.startswith(("typer", "click"))} - {"__future__"}
    assert len(rest) <= 2, rest


def _yaml(folder: Path, text: str) -> Path:
    path = folder / "options.yaml"
    path.write_text(text)
    return path
