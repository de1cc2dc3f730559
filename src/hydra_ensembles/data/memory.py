"""When memory runs out: halve the batch, warn and continue; explain a loader that was killed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..answer_each import BatchLimit, free_memory, is_out_of_memory
from ..errors import DataError, HydraError
from .batches import batch_length, take

Result = TypeVar("Result")


@contextmanager
def in_plain_words() -> Iterator[None]:
    """Raise a clear error when memory runs out or a loader's process dies; nothing is halved."""
    try:
        yield
    except HydraError:
        raise
    except Exception as error:
        if _is_lost_worker(error):
            raise _lost_worker(error, "data") from error
        if not is_out_of_memory(error):
            raise
        raise DataError(
            f"Memory ran out ({' '.join(str(error).split())[:200]}). Give smaller batches, or use "
            "a device with more memory; where a folder was given, finished steps are kept in it."
        ) from error


def telling_lost_workers(data: Iterable[Any], name: str) -> Iterator[Any]:
    """Iterate over data; raise a clear error when a process that loads it dies."""
    source = iter(data)
    while True:
        try:
            item = next(source)
        except StopIteration:
            return
        except Exception as error:
            if not _is_lost_worker(error):
                raise
            raise _lost_worker(error, name) from error
        yield item


def _is_lost_worker(error: BaseException) -> bool:
    """Return whether a process of a `DataLoader` died; torch has no error class for it."""
    if isinstance(error, RuntimeError):
        return "DataLoader worker" in str(error)
    # It may die after it announced a batch: then fetching the batch's memory from it fails.
    return isinstance(error, (OSError, EOFError)) and any(
        frame.f_globals.get("__name__") == "multiprocessing.resource_sharer"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _lost_worker(error: BaseException, name: str) -> DataError:
    return DataError(
        f"A process that loads the {name} died ({' '.join(str(error).split())[:200]}). Finished "
        "steps are kept; start again. If it dies again, it may lack memory: use fewer workers "
        "(num_workers=0 has none) or smaller batches."
    )


class Halving(BatchLimit):
    """Runs batches; one that does not fit in memory in halves, and later ones as small.

    Args:
        name: Name of the data in warnings and errors.
        most: Most examples at once; None sets no limit until memory runs out.
    """

    def __call__(self, run: Callable[[Any], Result], batch: Any) -> Iterator[tuple[Any, Result]]:
        """Yield parts of a batch with the results of `run`; usually one part, the whole batch."""
        waiting = self._cut([batch])
        while waiting:
            try:
                result = run(waiting[0])
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = error.with_traceback(None)  # the traceback holds the call's tensors
            else:
                yield waiting.pop(0), result
                continue
            self.halve(batch_length(waiting[0]), failed)
            free_memory()
            waiting = self._cut(waiting)

    def _cut(self, batches: list[Any]) -> list[Any]:
        if self.most is None:
            return batches
        return [
            take(batch, slice(start, start + self.most))
            for batch in batches
            for start in range(0, max(1, batch_length(batch)), self.most)
        ]
