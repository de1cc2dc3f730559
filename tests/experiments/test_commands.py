"""Commands of the pages, as they are written, on a machine that lacks what they need."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"
NO_DATA, NO_HOST = "HYDRA_DATA", "There is no host"


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("run.py text", NO_HOST),
        ("run.py imagenet", NO_DATA),
        ("run.py paper-cola", NO_HOST),
        ("run.py pruning", NO_DATA),
        ("run.py finetune sst2", NO_DATA),
        ("novelty.py table sst2", "novelty.py features sst2"),
        ("novelty.py features imagenet --seeds student", "one host"),
        ("novelty.py features sst2 --seeds student", NO_HOST),
        ("hies.py", NO_DATA),
        ("uncertainty_heads.py", NO_HOST),
        ("run.py least-squares-sst2", NO_HOST),
        ("ways.py sst2", NO_HOST),
        ("zero_shot_reach.py", NO_DATA),
        ("policy_coverage.py", "novelty.py features"),
        ("set_coverage.py", "set_coverage.py answers"),
        ("set_coverage.py answers sst2", NO_HOST),
        ("llama.py", NO_DATA),
        ("every_task.py answers", NO_HOST),
    ],
)
def test_a_command_says_what_is_missing(
    command: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HYDRA_DATA", "HYDRA_HOSTS", "HYDRA_CACHE", "HYDRA_WORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit, match=missing):
        runpy.run_path(str(FOLDER / script), run_name="__main__")
