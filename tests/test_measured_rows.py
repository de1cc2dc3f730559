"""Measured costs of the results tables: which rows share a structure, and what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loose_files import load

rows = load("experiments/measured_rows.py")


@pytest.mark.parametrize(
    ("table", "row", "structure"),
    [
        ("text", "temperature", "single"),
        ("text", "single, trained with outliers", "single"),
        ("text", "single, readout only", "single, readout only"),
        ("zeroshot", "single", "single, readout only"),
        ("zeroshot", "ViLU, labelled test classes", "ViLU"),
        ("zeroshot", "CircAvg single", "Taylor single"),
        ("text", "Hydra select M=3, member temperatures", "Hydra select M=3"),
        ("text", "Hydra select M=3, trained with outliers", "Hydra select M=3, trained"),
        ("cifar10", "Hydra M=3, distilled, trained", "Hydra M=3, distilled, trained"),
        ("cifar10", "Hydra M=3, distilled", "Hydra M=3, distilled"),
        ("text", "Deep Ensembles", "Deep Ensembles"),
    ],
)
def test_rows_share_structures(table: str, row: str, structure: str) -> None:
    assert rows.structure_of(table, row) == structure


def test_cells_say_what_was_timed(tmp_path: Path) -> None:
    assert rows.read(tmp_path) == {}
    one = {
        "counted": 0.95,
        "ratios": {"1": [0.9, 0.8, 1.0], "8": [0.97, 0.96, 0.98]},
        "rounds": {"1": 9, "8": 5},
    }
    (tmp_path / rows.NAME).write_text(json.dumps({"text": {"structures": {"Hydra": one}}}))
    measured = rows.read(tmp_path)
    assert rows.cell(measured, "text", "Hydra, member temperatures") == "0.90 / 0.97"
    assert rows.cell(measured, "text", "another") == "-"
    assert rows.cell(measured, "cifar10", "Hydra") == "-"
    record = {"name": "text", "rows": [{"name": "Hydra, member temperatures"}, {"name": "Hydra"}]}
    assert rows.lines(measured["text"], record) == [
        [
            "Hydra",
            "0.950",
            "0.900 [0.800, 1.000]",
            "0.970 [0.960, 0.980]",
            "9 / 5",
            "Hydra, member temperatures",
        ]
    ]
