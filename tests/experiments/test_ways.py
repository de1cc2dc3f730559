"""Ways to train members: folds that leave the validation digits out, and trials of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab.folds import FOLDS, pooled
from lab.tasks import open_task
from lab.trials import Trial, mutual_information, trying
from run import read_table

from hydra_ensembles.data.digits_data import digits
from hydra_ensembles.training import distill
from hydra_ensembles.uncertainty import score_logits
from tests import zoo


def rows_of(data: Any) -> set[bytes]:
    return {image.numpy().tobytes() for batch in data for image in batch["pixel_values"]}


def test_every_digit_but_those_that_choose_is_tested_once() -> None:
    demo = digits(16, seed=0)
    everything = rows_of(demo.train) | rows_of(demo.test)
    choosing = rows_of(demo.validation)
    tested: list[bytes] = []
    for name in FOLDS:
        task = open_task(name)
        test, train = rows_of(task.test), rows_of(task.training("train"))
        assert not test & train and test | train == everything
        assert rows_of(task.held_out) == choosing and not choosing & (test | train)
        assert task.ood["unseen"]["inverted"].count == task.test.count
        tested += test
    assert len(tested) == len(set(tested)) and set(tested) == everything


def test_answers_of_folds_are_pooled_set_by_set() -> None:
    folds = [{"test": {"logits": torch.full((n, 1, 2), float(n))}} for n in (2, 3)]
    assert pooled(folds)["test"]["logits"][:, 0, 0].tolist() == [2, 2, 3, 3, 3]


def test_trials_of_the_table_are_known() -> None:
    for rows in read_table("ways")["candidates"].values():
        for row in rows:
            Trial(**row.get("trial", {}))


def distilled(**trial: Any) -> Any:
    model = zoo.make("vit")
    inputs = zoo.batch("vit", 16)
    labels = torch.arange(16) % 5
    other = zoo.make("vit")
    with torch.no_grad():
        other.classifier.weight.copy_(other.classifier.weight.roll(1, 0))  # teachers disagree
    with trying(trial):
        return distill(
            model,
            [model, other],
            [(inputs, labels)],
            members=2,
            max_cost=2.0,
            epochs=2,
            learning_rate=5e-3,
            validation=[(inputs, labels)],
            calibrate=False,
            novelty=False,
            progress=False,
        )


def test_repulsion_drives_members_apart_on_label_destroying_inputs() -> None:
    noise = zoo.batch("vit", 16, seed=2)

    def spread(model: Any) -> float:
        with torch.no_grad():
            return float(score_logits(model.member_logits(noise), "mutual-information").mean())

    assert spread(distilled(repel=20.0, beyond=5.0)) > spread(distilled())


def test_mutual_information_is_that_of_the_library() -> None:
    logits = 2 * torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0))
    ours = mutual_information(logits.log_softmax(-1))
    torch.testing.assert_close(ours, score_logits(logits, "mutual-information").to(ours))


def test_an_unknown_trial_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown"):
        distilled(unknown=1)
