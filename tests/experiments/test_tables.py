"""Table files are whole, and the pages in docs/results are what their commands write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from lab.decoder import DecoderSst2
from lab.methods import MASKS, methods
from lab.other_tasks import OTHER_TASKS
from lab.page import COLUMNS, write_page
from lab.recipes import RECIPES, Drawn
from lab.records import PAGES, Records
from lab.sets import ImageSet
from lab.tasks import TASKS, Cifar10
from run import TABLES, read_table

from hydra_ensembles.research.rivals import baselines
from hydra_ensembles.uncertainty import scores

NAMES = sorted(file.stem for file in TABLES.glob("*.yaml"))
MADE = [name for name in NAMES if (PAGES / f"{name}.md").exists()]


@pytest.mark.parametrize("name", NAMES)
def test_table_files_name_things_that_exist(name: str) -> None:
    table = read_table(name)
    assert len(table.get("setup", ())) <= 5
    assert len(table.get("columns", COLUMNS)) + 2 <= 8
    assert set(table.get("scores", ())) <= set(scores)
    rows = table.get("rows", [])
    assert len({row["name"] for row in rows}) == len(rows)
    every = rows or table.get("shared_rows", [])
    assert set(table.get("against", ())) <= {row["name"] for row in every}
    for row in rows:
        methods[row["method"]]
        if row["method"] == "baseline":
            baselines[row["baseline"]]
        if "source" in row and row["source"] != "host":
            record = json.loads((MASKS / f"{table['task']}.json").read_text())
            assert len(record["rows"][row["source"]]) >= row.get("draws", 1)
    if rows:
        assert table["task"] in {*TASKS, "zeroshot", DecoderSst2.name}


@pytest.mark.parametrize("name", MADE)
def test_pages_are_what_their_command_writes(name: str, tmp_path: Path) -> None:
    for file in PAGES.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    page = write_page(read_table(name), tmp_path).read_text(encoding="utf-8")
    assert page == (PAGES / f"{name}.md").read_text(encoding="utf-8"), f"run {name} --page"
    longest = 22_000 if name == "least-squares" else 6500  # five tasks, six questions
    assert len(page) < longest, "a page is read in two minutes"
    assert 1 <= len(read_table(name)["conclusions"]) <= 8


def test_recipes_and_splits() -> None:
    for name, recipe in yaml.safe_load(RECIPES.read_text(encoding="utf-8")).items():
        assert name in {*TASKS, *OTHER_TASKS, DecoderSst2.name} and recipe["epochs"] >= 1
    parts = json.loads((RECIPES.parent / "splits" / "sst2.json").read_text())
    seen: set[int] = set()
    for rows in parts.values():
        assert not seen & set(rows)
        seen |= set(rows)


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    records = Records(
        rows={("a, b", 0): {"commit": "abc1234", "cost": 1.5, "cls/Acc": 0.25}},
        differences={("a, b", "single", "cls/Acc"): (0.1, -0.2, 0.3, "evaluate")},
    )
    records.write("x", ["a, b"], tmp_path)
    again = Records.read("x", tmp_path)
    assert again.rows == records.rows and again.differences == records.differences
    assert again.mean("a, b", "cls/NLL") is None


def test_training_images_are_drawn_anew_each_epoch() -> None:
    pixels = torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1).expand(12, 3, 8, 8)
    images = ImageSet(pixels.contiguous(), torch.arange(12))
    drawn = Drawn(Cifar10(None, None), images, batch_size=5, seed=0)
    epochs = []
    for epoch in range(2):
        drawn.set_epoch(epoch)
        batches = list(drawn)
        assert len(batches) == len(drawn) == 3
        assert batches[0][0].shape == (5, 3, 112, 112)
        epochs.append(torch.cat([labels for _, labels in batches]))
        assert sorted(epochs[-1].tolist()) == list(range(12))
    assert not torch.equal(*epochs)
    drawn.set_epoch(0)
    assert torch.equal(torch.cat([labels for _, labels in drawn]), epochs[0])
