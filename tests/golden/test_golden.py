"""The library answers as it did when the golden values were recorded, to 1e-6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.golden import adapter, cases, record

STORED = record.stored()


def differences(group: str, values: cases.Values) -> list[str]:
    """List the fields of a group that differ from the stored ones; new fields do not count."""
    found = []
    for name, wanted in STORED.items():
        if not name.startswith(f"{group}/"):
            continue
        actual = values.get(name.removeprefix(f"{group}/"))
        if actual is None:
            found.append(f"{name}: not computed any more")
        elif actual.shape != wanted.shape:
            found.append(f"{name}: shape {actual.shape}, stored {wanted.shape}")
        else:
            bound = cases.tolerance(name) if wanted.dtype.kind == "f" else 0.0
            if not np.allclose(actual, wanted, rtol=bound, atol=bound, equal_nan=True):
                largest = np.nanmax(np.abs(actual.astype(float) - wanted.astype(float)))
                found.append(f"{name}: differs by {largest:.3g}, at most {bound:g} allowed")
    return found


@pytest.mark.parametrize("group", cases.GROUPS)
def test_values_are_the_golden_ones(group: str) -> None:
    found = differences(group, cases.GROUPS[group]())
    assert not found, "\n".join([f"{len(found)} golden values differ:", *found])


def test_every_group_is_stored() -> None:
    for group in cases.GROUPS:
        assert any(name.startswith(f"{group}/") for name in STORED), group


def test_a_small_change_is_found() -> None:
    prefix = "zoo/vit/"
    values = {n.removeprefix(prefix): v.copy() for n, v in STORED.items() if n.startswith(prefix)}
    assert differences("zoo/vit", values) == []
    values["fused/branched/novelty_score"][3] += 1e-4
    del values["host/one/decision"]
    assert [line.split(":")[0] for line in differences("zoo/vit", values)] == [
        f"{prefix}fused/branched/novelty_score",
        f"{prefix}host/one/decision",
    ]


@dataclass
class Named:
    """An answer with a number of the class, decisions in words, and rows with both."""

    class_index: np.ndarray
    confidence: np.ndarray
    decision: list[str]
    novelty: None = None

    def rows(self) -> list[dict[str, Any]]:
        parts = zip(self.class_index.tolist(), self.confidence.tolist(), self.decision, strict=True)
        return [
            {"label": f"name {c}", "class": c, "confidence": p, "novelty": None, "decision": d}
            for c, p, d in parts
        ]


def test_answers_with_the_other_names_are_read_too() -> None:
    answer = Named(np.array([2, 0]), np.array([0.5, 0.75]), ["answer", "new"])
    found = adapter.columns(answer)
    assert {name: value.tolist() for name, value in found.items()} == {
        "class_index": [2, 0],
        "confidence": [0.5, 0.75],
        "decision": [0, 2],
    }
    wrong = Named(np.array([2, 0]), np.array([0.5, 0.75]), ["answer", "new"])
    wrong.rows = lambda: [{**row, "class": 1} for row in answer.rows()]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="row 0, class_index"):
        adapter.columns(wrong)
