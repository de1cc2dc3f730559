"""The attack on the service, with small numbers: nothing valid is lost, nothing is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attack.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, limits memory")
def test_valid_requests_are_answered_beside_every_kind_of_attack(saved: Path) -> None:
    spec = importlib.util.spec_from_file_location("attack", SCRIPT)
    assert spec is not None and spec.loader is not None
    attack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attack)
    slow = {"24 large images at once", "huge JSON"}
    for name in slow:
        del attack.ATTACKS[name]
    options = ["--valid", "40", "--malformed", str(len(attack.ATTACKS)), "--seconds", "60"]
    found = attack.run(attack.parser().parse_args(options), saved / "digits")
    assert found["valid"] == {"sent": 40, "right": 40, "wrong": 0, "lost": {}, "not_sent": 0}
    assert set(found["malformed"]["by_kind"]) == set(attack.ATTACKS)
    assert found["service"]["died"] is None and found["service"]["exit_code"] == 0
    assert found["service"]["tracebacks"] == 0
    kinds = found["malformed"]["by_kind"]
    assert set(kinds["oversized body"]) == set(kinds["oversized chunked body"]) == {"413"}
    assert set(kinds["long header or path in one burst"]) <= {"400", "431"}
    assert set(kinds["no token or a wrong one"]) == {"401"}
