"""Answer every input of a list: each gets its answer or the reason why it has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DataError
from .memory import Halving, free_memory, is_out_of_memory

Input = TypeVar("Input")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class InputError:
    """An input that has no answer, and why.

    Attributes:
        reason: The error's kind and text, without object addresses: the same in every run.
    """

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> InputError:
        """Describe an error in at most 200 letters."""
        text = re.sub(r"( object)? at 0x[0-9a-fA-F]+", "", str(error))
        return cls(f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__)

    def __str__(self) -> str:
        return self.reason


def answer_each(
    predict: Callable[[list[Input]], Sequence[Answer]],
    inputs: Sequence[Input],
    *,
    most: int | Halving | None = None,
) -> list[Answer | InputError]:
    """Answer inputs together; in halves if memory runs out; one by one if one of them fails.

    A bad input never costs the others their answers. `KeyboardInterrupt` and the like pass through.

        >>> answer_each(lambda numbers: [1 / number for number in numbers], [1, 0, 2])
        [1.0, InputError(reason='ZeroDivisionError: division by zero'), 0.5]

    Args:
        predict: Maps inputs to one answer each, in order.
        inputs: The inputs, in any number.
        most: Most inputs at once. A `Halving` remembers from call to call what fitted in memory.
    """
    halving = most if isinstance(most, Halving) else Halving("inputs", most)
    answers: list[Answer | InputError] = []
    while len(answers) < len(inputs):
        part = list(inputs[len(answers) :][: halving.most])
        try:
            found = predict(part)
            if len(found) != len(part):
                raise DataError(f"{len(part)} inputs got {len(found)} answers; expected one each.")
            answers += found
            continue
        except Exception as error:
            failed = error.with_traceback(None)  # the traceback holds the call's tensors
        if short := is_out_of_memory(failed):
            free_memory()
        if len(part) == 1:
            answers.append(InputError.of(failed))
        elif short:
            halving.halve(len(part), failed)
        else:
            answers += [answer for one in part for answer in answer_each(predict, [one])]
    return answers
