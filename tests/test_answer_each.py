"""Each input gets its answer or its error: together, in halves, one by one."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.answer_each import InputError, answer_each
from hydra_ensembles.data.memory import Halving


class Model:
    """Squares numbers; fails on negative ones and on more than `room` at once."""

    def __init__(self, room: int = 100) -> None:
        self.room, self.sizes = room, []

    def __call__(self, numbers: list[int]) -> list[int]:
        self.sizes.append(len(numbers))
        if len(numbers) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        if min(numbers) < 0:
            raise ValueError(f"{numbers} has a negative number, {object()}")
        return [number**2 for number in numbers]


def test_inputs_are_answered_together() -> None:
    model = Model()
    assert answer_each(model, range(7)) == [0, 1, 4, 9, 16, 25, 36]
    assert answer_each(model, []) == []
    assert model.sizes == [7]


def test_most_inputs_at_once() -> None:
    model = Model()
    assert answer_each(model, range(5), most=2) == [0, 1, 4, 9, 16]
    assert model.sizes == [2, 2, 1]


def test_one_that_fails_leaves_the_others_alone() -> None:
    answers = answer_each(Model(), [1, -2, 3])
    assert answers == [1, InputError("ValueError: [-2] has a negative number, <object>"), 9]
    assert answer_each(Model(), [-1]) == [answer_each(Model(), [1, -1])[1]]


def test_halves_when_memory_runs_out() -> None:
    model = Model(room=2)
    with pytest.warns(UserWarning, match="batches of"):
        assert answer_each(model, [*range(6), -1]) == [
            *(number**2 for number in range(6)),
            InputError("ValueError: [-1] has a negative number, <object>"),
        ]
    assert model.sizes == [7, 4, 2, 2, 2, 1]


def test_a_limit_that_is_kept_is_found_once() -> None:
    model, halving = Model(room=2), Halving("inputs")
    with pytest.warns(UserWarning, match="batches of 2"):
        answer_each(model, range(4), most=halving)
    answer_each(model, range(4), most=halving)
    assert model.sizes == [4, 2, 2, 2, 2]


def test_a_single_input_that_does_not_fit_is_an_error() -> None:
    assert answer_each(Model(room=0), [1]) == [InputError("OutOfMemoryError: out of memory")]


def test_a_missing_answer_is_an_error() -> None:
    answers = answer_each(lambda numbers: [], [1])
    assert isinstance(answers[0], InputError) and "expected one each" in answers[0].reason


def test_an_interrupt_is_not_an_answer() -> None:
    def stop(numbers: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_each(stop, [1, 2])
