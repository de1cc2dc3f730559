"""The page of near novelty: it says by itself which goals are met, and is what its record gives."""

from __future__ import annotations

import json
from typing import Any

from lab.near_page import OURS, conclusions, page
from lab.records import PAGES


def draw(usual: float, default: float, rival: float, far: float, *, joined: bool) -> dict[str, Any]:
    """Return the record of one draw."""
    rows = {
        OURS[0]: {"left-out": usual, "trec": 99.0},
        OURS[1]: {"left-out": default, "trec": far},
        "msp": {"left-out": rival, "trec": 80.0},
        "vim": {"left-out": rival - 2, "trec": 90.0},
    }
    says = "the usual terms and others (...)" if joined else "the usual terms (...)"
    return {"far": ["trec"], "rows": rows, "default": {"says": says}}


def test_goals_that_are_met_and_missed_are_told_apart() -> None:
    columns = {
        "near": [draw(80.0, 90.0, 90.2, 98.9, joined=True)],
        "behind": [draw(80.0, 80.0, 85.0, 99.0, joined=False)],
    }
    alarms = {
        "a, 200": {"0": [5.0, True], "1": [5.2, False]},
        "b, 200": {"0": [6.0, True], "1": [7.0, True]},
    }
    near, far, rates = conclusions(columns, alarms)
    assert "in 1 of 2 columns" in near and "further behind on behind (80.0; msp 85.0)" in near
    assert "+10.0 on near" in near and "No set loses more than 0.3" in far
    assert "in 1 of 2 rows; outside: b, 200 (6.50 % ± 0.50, 2 splits)" in rates
    columns["near"] = [draw(80.0, 90.0, 90.2, 98.0, joined=True)]
    assert "lost on trec (near: 99.0 to 98.0)" in conclusions(columns, {})[1]


def test_the_page_is_what_its_command_writes() -> None:
    record = json.loads((PAGES / "near.json").read_text(encoding="utf-8"))
    assert (PAGES / "near.md").read_text(encoding="utf-8") == page(record), "run near.py page"
