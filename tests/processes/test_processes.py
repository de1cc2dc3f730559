"""One process or several: the same numbers, the same errors, in every one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from . import jobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROCESSES = 3


def launch(count: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes on this machine."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every process of a group said, by job."""
    folder = tmp_path_factory.mktemp("several")
    done = launch(PROCESSES, "-m", "tests.processes.jobs", str(folder), *jobs.JOBS)
    assert done.returncode == 0, done.stderr
    return {
        name: [
            json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(PROCESSES)
        ]
        for name in jobs.JOBS
    }


@pytest.mark.parametrize("name", ["evaluates", "scores", "builds"])
def test_several_processes_give_what_one_gives(
    name: str, several: dict[str, list[Any]], tmp_path: Path
) -> None:
    alone = json.loads(json.dumps(jobs.JOBS[name](tmp_path)))
    for said in several[name]:
        assert said == alone


def test_commands_write_and_print_what_one_process_does(
    several: dict[str, list[Any]], tmp_path: Path
) -> None:
    alone = json.loads(json.dumps(jobs.commands(tmp_path)))
    assert alone["codes"] == [0, 0, 0, 0, 3]
    assert len(alone["lines"]) == 83 and "there is no such file" in alone["none"]
    first, *others = several["commands"]
    assert first == alone
    for said in others:
        assert said == {**alone, "lines": [], "codes": [0] * 5}


def test_training_is_the_same_to_the_bit_where_batches_are_cut_alike(
    several: dict[str, list[Any]], tmp_path: Path
) -> None:
    alone = json.loads(json.dumps(jobs.trains(tmp_path)))
    for said in several["trains"]:
        for name in ("cut", "finetune", "dropout", "branch"):
            assert said[name] == alone[name]
        assert said["plain"]["fingerprint"] != alone["plain"]["fingerprint"]  # rounding
        for key in ("logits", "history"):
            mine, theirs = _flat(said["plain"][key]), _flat(alone["plain"][key])
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_layers_refitted_together_are_those_of_one_process_up_to_rounding(
    several: dict[str, list[Any]], tmp_path: Path
) -> None:
    alone = json.loads(json.dumps(jobs.refits(tmp_path)))
    first = several["refits"][0]
    assert all(said == first for said in several["refits"])
    for name in ("units", "ridges", "files"):
        assert first[name] == alone[name]
    assert len(first["files"]) == len(first["fits"]) > 3
    for name in ("fits", "logits"):  # sums of several processes are added in another order
        torch.testing.assert_close(_flat(first[name]), _flat(alone[name]), rtol=1e-5, atol=1e-5)
    assert first["folded"] == alone["folded"]


def _flat(value: Any) -> torch.Tensor:
    rows = [list(row.values()) if isinstance(row, dict) else row for row in value]
    return torch.tensor(rows, dtype=torch.float64)


def test_an_error_of_one_process_is_raised_in_all(several: dict[str, list[Any]]) -> None:
    said = several["refuses"]
    assert said[0] == said[1] == said[2]
    assert "NaN for 7 of 7 examples in batch 5 of the data set 'id'" in said[0]["broken"]
    assert "a share of the data already (DataLoader, DistributedSampler)" in said[0]["shared"]
    for name in ("shuffled", "longer"):
        assert "The processes read different data as 'id'" in said[0][name]
    assert "is empty" in said[0]["empty"]
