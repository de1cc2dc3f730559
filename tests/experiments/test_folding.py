"""The page on folding says what its record holds."""

from __future__ import annotations

import json

import folding
from lab.records import PAGES


def test_the_page_is_made_from_its_record() -> None:
    record = json.loads((PAGES / "folding.json").read_text(encoding="utf-8"))
    page = (PAGES / "folding.md").read_text(encoding="utf-8")
    assert page == folding.page(record), "run: python experiments/folding.py --page"


def test_bold_differences_exclude_zero() -> None:
    assert folding.difference("cls/NLL", 0.01, 0.001, 0.02).startswith("**+0.010")
    assert folding.difference("cls/Acc", 0.01, -0.001, 0.02) == "+1.0 [-0.1, +2.0]"
