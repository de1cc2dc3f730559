"""What an input has that no known input has is said in words that a person can check."""

from __future__ import annotations

import json

import pytest
import torch

from hydra_ensembles.errors import FormatError
from hydra_ensembles.uncertainty.known_ranges import KnownRanges


def ranges() -> KnownRanges:
    scripts = ["Latin"] * 197 + ["Greek"] * 2 + ["Cyrillic"]  # one in 200 is below 1 %
    brightness = torch.linspace(0.2, 0.4, 200)
    return KnownRanges.of({"words": range(1, 201), "script": scripts, "brightness": brightness})


def test_one_percent_lies_on_each_side() -> None:
    known = ranges()
    assert known.ranges["words"] == (2, 199)
    assert known.scripts == ("Greek", "Latin")
    single = KnownRanges.of({"tokens": [5]})
    assert single.ranges == {"tokens": (5, 5)}


def test_only_facts_outside_are_said() -> None:
    facts = {
        "words": [1, 2, 199, 250],
        "script": ["Latin", "Greek", "Cyrillic", "no letters"],
        "brightness": torch.tensor([0.3, 0.1985, 0.41, 0.0]),
        "width": [1, 2, 3, 4],  # of known inputs no width is known
    }
    assert ranges().outside(facts, 4) == [
        ("length 1 word; known texts have 2 to 199",),
        (),  # 0.1985 is shown as 0.20, the smallest known value
        (
            "brightness 0.41; known images have 0.20 to 0.40",
            "script Cyrillic; known texts are in Greek or Latin",
        ),
        (
            "length 250 words; known texts have 2 to 199",
            "brightness 0.00; known images have 0.20 to 0.40",
            "no letters; known texts are in Greek or Latin",
        ),
    ]
    same = KnownRanges.of({"width": [32] * 20, "capitals": [0.0] * 20})
    assert same.outside({"width": [32, 224], "capitals": [0.2, 37.5]}, 2) == [
        (),
        ("38 % capital letters; known texts have 0 %", "width 224 pixels; known images have 32"),
    ]


def test_saved_as_json_and_checked_when_read() -> None:
    known = KnownRanges.of({"contrast": [0.1, 0.2]}, ((0.5,), (0.25,)))
    data = json.loads(json.dumps(known.to_dict()))
    assert KnownRanges.from_dict(data) == known
    assert KnownRanges.from_dict(None) == KnownRanges()
    for change in (
        {"ranges": {"contrast": [2, 1]}},
        {"ranges": {"contrast": ["a", "b"]}},
        {"ranges": None},
        {"scripts": 3},
        {"scale": [[0.5], [0.5, 0.5]]},
    ):
        with pytest.raises(FormatError, match="ranges of known inputs"):
            KnownRanges.from_dict({**data, **change})
