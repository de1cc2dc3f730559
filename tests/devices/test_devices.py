"""On a device `predict` copies nothing more than its host, waits once at most, and mixes nothing.

There is no GPU here, so that the device is pretended (`pretended_device.py`), in a process of its
own: a device stays registered in torch.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("predictions.py")


def case_names() -> list[str]:
    """Read the names of the cases without the device that their module registers."""
    for node in ast.parse(FILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CASES":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("no CASES")


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    """What every case copies and waits for."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python")
    command = [sys.executable, "-m", "tests.devices.predictions"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("@")[2])
    return found


def test_the_device_counts_and_refuses(counts: dict[str, Any]) -> None:
    known = counts["known"]
    assert "expected all tensors to be on one device" in known.pop("mixed")
    assert known == {
        **{way: {"waits": 1} for way in ("item", "bool", "nonzero", "mask")},
        **{way: {"to host": 1} for way in ("list", "copy")},
        **{way: {"to device": 1} for way in ("numbers", "index")},
        "filled": {},
    }


@pytest.mark.parametrize("name", case_names())
def test_predict_stays_on_the_device(name: str, counts: dict[str, Any]) -> None:
    found = counts[name]
    host, inputs = found["host"], found["inputs"]
    assert found["places"] == ["pretended:0"]
    assert found["off"] < 1e-5, "the same numbers as on the CPU"
    for way, copied in (("from device", 0), ("from host", inputs)):
        moves = found[way]
        assert moves.get("to device", 0) <= copied + host.get("to device", 0), way
        assert moves.get("to host", 0) == 0, way
        # images that are on the device already are checked there, once
        checked = way == "from device" and inputs == 1
        assert moves.get("waits", 0) <= host.get("waits", 0) + checked, way
    assert found["rows"]["to host"] == 1
    assert found["rows"].get("waits", 0) == 0
