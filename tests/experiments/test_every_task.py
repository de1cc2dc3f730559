"""The page of every task is that of its record; words are judged by text."""

from __future__ import annotations

import json

import pytest
import torch


def test_the_page_is_that_of_the_record() -> None:
    from lab.records import PAGES
    from lab.task_page import page

    record = json.loads((PAGES / "every-task.json").read_text(encoding="utf-8"))
    assert page(record) == (PAGES / "every-task.md").read_text(encoding="utf-8")


def test_mean_coverage_is_what_was_asked_for() -> None:
    from lab.records import PAGES

    record = json.loads((PAGES / "every-task.json").read_text(encoding="utf-8"))
    found = {k: v for task in record["coverage"].values() for k, v in task.items()}
    assert found
    for name, values in found.items():
        half = values["texts"] - values["texts"] // 2
        off = 1.96 * (0.9 * 0.1 / half) ** 0.5
        assert values["coverage"][0] >= 0.9 - off, name


def words() -> dict[str, torch.Tensor]:
    """Three texts of 2, 3 and 1 words; classes 1 and 2 begin and go on with one kind of name."""
    labels = torch.tensor([1, 2, 0, 0, 3, 1])
    logits = 4 * torch.nn.functional.one_hot(labels, 13).float()[:, None]
    return {"logits": logits, "labels": labels, "text": torch.tensor([0, 0, 1, 1, 1, 2])}


def test_some_texts_are_numbered_anew() -> None:
    from lab.task_figures import TASKS, Said

    said = Said(TASKS["wnut17"], {**words(), "novelty": torch.tensor([0.1, 0.2, 0.3])})
    some = said.rows(torch.tensor([2, 0]))
    assert some.labels.tolist() == [1, 1, 2] and some.text.tolist() == [0, 1, 1]
    assert some.tensors["novelty"].tolist() == pytest.approx([0.3, 0.1])
    assert some.texts == 2


def test_entities_and_their_errors_are_counted_by_text() -> None:
    from lab.task_figures import entity_counts

    true, said = torch.tensor([1, 2, 0, 0, 3, 1]), torch.tensor([1, 2, 0, 3, 3, 0])
    unsure = torch.tensor([0.1, 0.4, 0.0, 0.7, 0.2, 0.9])
    counts, entities, of = entity_counts(said, true, words()["text"], unsure)
    assert counts.tolist() == [[1, 1, 1], [1, 2, 1], [0, 0, 1]]
    assert of.tolist() == [0, 1, 1]
    assert [wrong for wrong, _ in entities] == [False, True, False]
    assert [doubt for _, doubt in entities] == pytest.approx([0.4, 0.7, 0.2])


def test_the_threshold_has_the_best_micro_f1() -> None:
    from lab.task_figures import best_threshold

    chances = torch.tensor([[0.9, 0.2], [0.35, 0.1], [0.3, 0.6]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert 0.3 < best_threshold(chances, labels) <= 0.35


def test_stored_words_are_padded_to_texts() -> None:
    from lab.task_coverage import answer_of, covered
    from lab.task_figures import TASKS, Said

    from hydra_ensembles.uncertainty.set_fit import choose_sets

    answer, labels = answer_of(Said(TASKS["wnut17"], words()))
    assert labels.tolist() == [[1, 2, -100], [0, 0, 3], [1, -100, -100]]
    assert answer.class_index[labels >= 0].tolist() == words()["labels"].tolist()
    sets = choose_sets(answer, labels, method="lac", coverage=0.5)
    inside, sizes = covered(sets, answer, labels)
    assert inside.tolist() == [1, 1, 1] and sizes.tolist() == [1, 1, 1]
