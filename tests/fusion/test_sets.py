"""Sets of every task: fitted on held-out data, in every answer, saved, dropped when out of date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble, Sets
from hydra_ensembles.data.batches import labels_of
from hydra_ensembles.errors import DataError, FormatError, UnsupportedModelError
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


def test_sets_out_of_date_are_dropped() -> None:
    ensemble = ensemble_of("classes").fit_novelty_([inputs("classes", 40, 5)], progress=False)
    sets = hydra.fit_sets(ensemble, held_out("classes"), progress=False)
    ensemble.temperature = None  # as it was
    ensemble.fit_novelty_([inputs("classes", 40, 6)], progress=False)  # sets of classes read none
    assert ensemble.sets is sets
    with pytest.warns(UserWarning, match="Fit them again"):
        ensemble.temperature = 1.5
    assert ensemble.sets is None and ensemble.predict(inputs("classes")).set is None
    numbers = ensemble_of("number").fit_novelty_([inputs("number", 40, 5)], progress=False)
    numbers.sets = Sets("normalised", 0.9, ((2.0,),), ((40,),), 40, scale=((0.1, 1.0, 0.5),))
    with pytest.warns(UserWarning, match="what is known"):
        numbers.fit_novelty_([inputs("number", 40, 6)], progress=False)
    assert numbers.sets is None


def test_groups_are_named_at_predict_or_get_the_largest_sets(tmp_path: Path) -> None:
    ensemble, data = ensemble_of("classes"), held_out("classes")
    names = [["a", "b", "c"][min(i % 7, 2)] for i in range(SIZE * BATCHES)]
    names[-1] = "rare"
    sets = hydra.fit_sets(ensemble, data, coverage=0.8, groups=names, progress=False)
    assert sets.groups == ("a", "b", "c", "rare") and sets.counts[3] == (1,)
    pooled = hydra.fit_sets(ensemble_of("classes"), data, coverage=0.8, progress=False)
    assert sets.thresholds[3] == pooled.thresholds[0] and sets.pooled == [3]
    assert "1 of 4 groups have fewer than 4 examples" in str(sets)
    answer = ensemble.predict(inputs("classes"))
    scores = sets.scores(answer)
    for place, name in enumerate(sets.groups):
        mask = sets.mask(answer.in_groups([name] * len(answer)))
        assert (mask == (scores <= sets.thresholds[place][0])).all()
    largest = scores <= max(row[0] for row in sets.thresholds)
    for some in (answer, answer.in_groups(["nobody"] * 4), answer.to_numpy()):
        assert (sets.mask(some) == largest).all()
    mixed = answer.to_numpy().in_groups(["a", "nobody", "b", "c"])
    assert mixed[1].set == answer.set[1:2] and join([mixed[:2], mixed[2:]]).set == mixed.set
    with pytest.raises(ValueError, match="2 groups for 4 inputs"):
        answer.in_groups(["a", "b"])
    with pytest.raises(DataError, match="1 groups for 48 held-out examples"):
        hydra.fit_sets(ensemble, data, groups=["a"], progress=False)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    batch = inputs("classes")
    assert loaded.predict(batch).in_groups(list("abca")).set == answer.in_groups(list("abca")).set


def test_classes_with_few_examples_share_the_threshold_of_all() -> None:
    ensemble, data = ensemble_of("classes"), held_out("classes")
    for batch in data:
        batch["labels"] = torch.tensor([0, 0, 0, 1, 1, 1, 2, 0])
    data[0]["labels"][0] = 3
    sets = hydra.fit_sets(ensemble, data, groups="class", progress=False)
    assert sets.counts == ((23, 18, 6, 1, 0),) and sets.pooled == [2, 3, 4]
    assert "3 of 5 classes have fewer than 9 examples" in str(sets)
    pooled = hydra.fit_sets(ensemble, data, progress=False)
    assert {sets.thresholds[0][i] for i in (2, 3, 4)} == {pooled.thresholds[0][0]}


def test_what_has_no_sets_is_refused_by_its_name() -> None:
    for name, title in {"encoder": "Embeddings", "next words": "Predicting the next token"}.items():
        with pytest.raises(UnsupportedModelError, match=f"{title} has no sets"):
            hydra.fit_sets(ensemble_of(name), [inputs(name)], progress=False)


def test_errors_say_what_to_do() -> None:
    ensemble, data = ensemble_of("classes"), held_out("classes")
    sets = hydra.fit_sets(ensemble, data, coverage=0.8, progress=False)

    def refused(error: type[Exception], text: str, given: Any = data, **options: Any) -> None:
        with pytest.raises(error, match=text):
            hydra.fit_sets(ensemble, given, progress=False, **options)
        assert ensemble.sets is sets  # the sets before stay

    refused(DataError, r"0.99 needs at least 99 .* but there are 48.* at most 0.98", coverage=0.99)
    refused(DataError, "0.98 needs .* there are 38 .raps chooses", coverage=0.98, method="raps")
    refused(DataError, "empty", [])
    refused(DataError, "Batch 0 of the held-out data has no labels", [inputs("classes")])
    refused(DataError, "Label 9", [{**inputs("classes"), "labels": torch.tensor([0, 1, 9, 2])}])
    refused(ValueError, "between 0 and 1", coverage=1.0)
    refused(ValueError, "lac", method="plain")
    refused(ValueError, "for aps and raps", randomised=True)
    refused(ValueError, '"class", or one name', groups="kind")
    with pytest.raises(ValueError, match="needs classes"):
        hydra.fit_sets(ensemble_of("number"), held_out("number"), groups="class", progress=False)


def test_damaged_sets_in_a_folder_are_refused() -> None:
    sets = Sets("lac", 0.9, ((0.5,),), ((40,),), 40)
    assert Sets.from_dict(sets.to_dict()) == sets
    for change in (
        {"method": "magic"},
        {"coverage": 1.5},
        {"thresholds": [[float("nan")]]},
        {"thresholds": [[0.5, 0.6]]},
        {"counts": [[-1]]},
        {"scale": [[0.0, 1.0, 1.0]]},
        {"more": 1},
    ):
        with pytest.raises(FormatError, match="Not valid sets"):
            Sets.from_dict({**sets.to_dict(), **change})


def test_a_new_input_keeps_its_decision_and_the_answer_says_what_its_set_means() -> None:
    ensemble = ensemble_of("classes").fit_novelty_([inputs("classes", 40, 5)], progress=False)
    ensemble.policy = hydra.Policy(novelty_threshold=-1e9, alarm=0.05)
    hydra.fit_sets(ensemble, held_out("classes"), progress=False)
    answer = ensemble.predict(inputs("classes"))
    assert answer.decision == ["new"] * 4 and all(row["set"] is not None for row in answer.rows())
    assert "sets of new inputs have no guarantee" in repr(answer)


@pytest.mark.parametrize("name", ["classes", "labels", "number", "tags", "questions"])
def test_evaluate_tells_coverage_and_size(name: str) -> None:
    ensemble, data = ensemble_of(name), held_out(name)
    coverage = 0.5 if name == "questions" else 0.8
    sets = hydra.fit_sets(ensemble, data, coverage=coverage, progress=False)
    test = held_out(name, seed=40)
    found = hydra.evaluate(ensemble, test, bootstrap=0)
    answers = [ensemble.predict(batch) for batch in test]
    marks = [ensemble.task.check_labels(labels_of(batch), "test") for batch in test]
    covered = [sets.covered(a, m) for a, m in zip(answers, marks, strict=True)]
    assert found["set/Coverage"] == pytest.approx(np.concatenate(covered).mean())
    if name != "tags":
        sizes = np.concatenate([sets.sizes(answer) for answer in answers])
        assert found["set/Size"] == pytest.approx(sizes.mean())
    assert ("set/WorstClass" in found.figures) == (name in ("classes", "tags"))
