"""The one command that measures the cost page on a GPU runs, small, on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("sh") is None, reason="the script is one of a shell")
def test_the_script_measures_and_prints_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    places = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = ["sh", str(ROOT / "benchmarks" / "gpu.sh"), "--smoke", "--device", "cpu"]
    command += ["--results", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": places}

    def run() -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        logs = [log.read_text(encoding="utf-8") for log in tmp_path.glob("*.log")]
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
        return done.stdout

    first = run()
    assert "float32, eager: time relative to the plain model" in first
    assert "bfloat16, compiled: time relative to the plain model" in first
    ratios = {
        line.split(" | ")[0].removeprefix("| ") for line in first.splitlines() if line[:2] == "| "
    }
    assert {"hydra last 1", "hydra first", "deep ensemble", "predict novelty"} <= ratios
    assert "growth-members-smoke-float32-eager, 2, batch 1: " in first
    assert run().count("have ") == len(list(tmp_path.glob("*.json"))) == 3  # a second run resumes
