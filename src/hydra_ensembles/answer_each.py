"""Answer every input of a list: each gets its answer or the reason why it has none.

Importing this module does not import torch: the service of an exported ensemble uses it too.
"""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import DataError

Input = TypeVar("Input")
Answer = TypeVar("Answer")

_WORDS = (
    "can't allocate memory",  # torch on the CPU
    "not enough memory",
    "out of memory",  # CUDA, MPS, XPU
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: torch has an error class for GPUs, but none for the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def free_memory() -> None:
    """Free what a failed call left behind."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


class BatchLimit:
    """Most examples at once; halved when memory runs out.

    Args:
        name: Name of the data in warnings and errors.
        most: None sets no limit until memory runs out.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self.name, self.most = name, most

    def halve(self, size: int, error: BaseException) -> None:
        """Run at most half of `size` examples from now on, with a warning."""
        if size < 2:
            raise DataError(
                f"Memory ran out on a single example of the data set {self.name!r} ({error}). Use "
                "smaller images, shorter texts, a smaller model or a device with more memory."
            ) from error
        self.most = (size + 1) // 2
        warnings.warn(
            f"Memory ran out on {size} examples of the data set {self.name!r}: going on with "
            f"batches of {self.most}. Set this batch size to avoid the failed attempts.",
            stacklevel=4,
        )


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
    inputs: Sequence[Any],
    *,
    prepare: Callable[[Any], Input] | None = None,
    most: int | BatchLimit | None = None,
) -> list[Answer | InputError]:
    """Answer inputs together; in halves if memory runs out; one by one if one of them fails.

    A bad input never costs the others their answers. `KeyboardInterrupt` and the like pass through.

        >>> answer_each(lambda numbers: [1 / number for number in numbers], [1, 0, 2])
        [1.0, InputError(reason='ZeroDivisionError: division by zero'), 0.5]

    Args:
        predict: Maps inputs to one answer each, in order.
        inputs: The inputs, in any number.
        prepare: Maps one input to what `predict` takes; an input that it cannot prepare never
            reaches the model. By default inputs are taken as they are.
        most: Most inputs at once. A `BatchLimit` remembers from call to call what fitted in memory.
    """
    if prepare is not None:
        ready = prepare

        def prepare_all(part: list[Any]) -> list[Input]:
            return [ready(one) for one in part]

        prepared = answer_each(prepare_all, inputs, most=1)
        good = [one for one in prepared if not isinstance(one, InputError)]
        found = iter(answer_each(predict, good, most=most))
        return [one if isinstance(one, InputError) else next(found) for one in prepared]
    limit = most if isinstance(most, BatchLimit) else BatchLimit("inputs", most)
    answers: list[Answer | InputError] = []
    while len(answers) < len(inputs):
        part = list(inputs[len(answers) :][: limit.most])
        try:
            answered = predict(part)
            if len(answered) != len(part):
                raise DataError(
                    f"{len(part)} inputs got {len(answered)} answers; expected one each."
                )
            answers += answered
            continue
        except Exception as error:
            failed = error.with_traceback(None)  # the traceback holds the call's tensors
        if short := is_out_of_memory(failed):
            free_memory()
        if len(part) == 1:
            answers.append(InputError.of(failed))
        elif short:
            limit.halve(len(part), failed)
        else:
            answers += [answer for one in part for answer in answer_each(predict, [one])]
    return answers
