"""Sets of every task: fitted on held-out data, in every answer, saved, dropped when out of date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble
from hydra_ensembles.prediction import join
from tests.fusion.test_fusion import EARLY
from tests.tasks.test_tasks import HOSTS, host, inputs, labels

WITH_SETS = [name for name in HOSTS if name not in ("encoder", "next words")]
SIZE, BATCHES = 8, 6


def held_out(name: str, *, seed: int = 20) -> list[dict[str, Any]]:
    batches = [{**inputs(name, SIZE, s), **labels(name, SIZE)} for s in range(seed, seed + BATCHES)]
    for number, batch in enumerate(batches):  # labels that differ by batch
        if "labels" in batch and batch["labels"].is_floating_point() and "number" in name:
            batch["labels"] = batch["labels"] + 0.1 * number
        if name in ("tags", "masked words"):  # every batch has another padding
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    if name == "questions":  # positions that a span can have
        for batch in batches:
            batch["start_positions"] = batch["start_positions"].clamp_min(2)
            batch["end_positions"] = batch["end_positions"].clamp(2, 3)
    return batches


def ensemble_of(name: str) -> HydraEnsemble:
    return hydra.fuse(host(name), EARLY).eval()


def plain(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["set"] for row in rows]


@pytest.mark.parametrize("name", WITH_SETS)
def test_sets_are_in_the_answer_and_survive_saving(name: str, tmp_path: Path) -> None:
    ensemble, batch = ensemble_of(name), inputs(name)
    before = ensemble.predict(batch)
    assert before.set is None and before.rows()[0]["set"] is None
    coverage = 0.5 if name == "questions" else 0.8  # a tagger of noise finds few spans
    sets = hydra.fit_sets(ensemble, held_out(name), coverage=coverage, progress=False)
    assert ensemble.sets is sets and sets.method == ensemble.task.sets[0]
    assert sets.examples + sets.tuned == SIZE * BATCHES
    answer = ensemble.predict(batch)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    assert loaded.sets == sets and f"  sets     {sets.method}" in str(loaded)
    again = loaded.predict(batch)
    assert again.set == answer.set == answer.to_numpy().set
    assert plain(again.rows()) == plain(answer.to_numpy().rows())
    if name not in ("tags", "masked words"):
        assert plain(answer.rows()) == answer.set
        assert (
            join([answer[0], answer[1:]]).set
            == answer.set
            == [one for part in answer for one in part.set]
        )
        assert "set" in repr(answer)


def test_sets_of_classes_are_names_the_most_probable_first() -> None:
    ensemble = ensemble_of("classes")
    ensemble.id2label = [f"class {number}" for number in range(5)]
    hydra.fit_sets(ensemble, held_out("classes"), coverage=0.8, progress=False)
    answer = ensemble.predict(inputs("classes"))
    mask = ensemble.sets.mask(answer)
    for row, names, probabilities in zip(mask, answer.set, answer.probabilities, strict=True):
        inside = [i for i in probabilities.argsort(descending=True).tolist() if row[i]]
        assert names == [f"class {number}" for number in inside]
    assert mask.any() and not mask.all()


def test_intervals_hold_the_value_and_grow_with_novelty() -> None:
    ensemble = ensemble_of("numbers").fit_novelty_([inputs("numbers", 40, 5)], progress=False)
    data = held_out("numbers")
    sets = hydra.fit_sets(ensemble, data, coverage=0.8, progress=False)
    assert sets.method == "normalised" and len(sets.thresholds[0]) == len(sets.scale) == 3
    answer = ensemble.predict(inputs("numbers"))
    ends = sets.intervals(answer)
    assert ends.shape == (4, 3, 2) and np.allclose(ends.mean(-1), answer.values.numpy(), atol=1e-6)
    assert np.allclose(np.asarray(answer.set), ends, atol=1e-5)
    newer = replace(answer, novelty_score=torch.full((4,), 1000.0))
    grown = [novelty > 0 for _, _, novelty in sets.scale]
    assert ((sets.sigma(newer) > sets.sigma(answer)).all(0) == grown).all()
    assert (sets.sigma(answer) > 0).all()
    plain_sets = hydra.fit_sets(ensemble, data, coverage=0.8, method="plain", progress=False)
    assert np.ptp(np.diff(plain_sets.intervals(answer)), axis=0).max() < 1e-6
