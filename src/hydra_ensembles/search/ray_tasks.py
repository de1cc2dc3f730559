"""Candidates of a search as Ray tasks: one task runs all of them on one batch.

The caller keeps the data and the trunk's states; a task is handed the states of its batch and the
candidates' gates and returns their logits. It keeps nothing, so that Ray can run it again elsewhere
when its worker dies. The host travels once, through Ray's object store; Ray pickles what it carries
between its own processes, and nothing of it is kept as a file.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data import processes
from ..data.eval_mode import evaluating
from ..data.ray_cluster import import_ray, start_ray
from ..errors import HydraError
from .candidate_runs import Gates, climb
from .candidate_streams import Call, Engine, Replacement

RETRIES = 3
"""Workers that may die on one task."""

_current: ContextVar[RayTasks | None] = ContextVar("ray_tasks", default=None)
_engines: dict[str, Engine] = {}
"""In a worker: the engine that it ran last, so that it is unpacked once and not for every task."""


@dataclass(frozen=True)
class Job:
    """All candidates on one batch: the arguments of `climb`."""

    layer: int
    x: Tensor
    call: Call
    above: Sequence[Gates]
    edit: Replacement | None = None


@contextlib.contextmanager
def ray_tasks(workers: int = 2) -> Iterator[RayTasks]:
    """Run the candidates of all searches within the block as Ray tasks.

    On the cluster of `RAY_ADDRESS`, or on this machine. Ray starts with the first candidate. Masks
    and logits are those of this process, to the bit, on machines of one kind. Every task has as
    many threads as torch has here, since their number can move the last bit.

    Args:
        workers: Tasks at a time.

    Example:
        >>> with ray_tasks(workers=8):
        ...     mask = find_circuit(model, id=validation)
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: expected 1 or more.")
    if processes.size() > 1:
        raise HydraError(
            f"{processes.size()} processes of a launcher share the work already: start one process "
            "for Ray, or leave Ray out."
        )
    import_ray()  # that it is missing is said now, not after the first pass
    tasks = RayTasks(workers)
    token = _current.set(tasks)
    try:
        yield tasks
    finally:
        _current.reset(token)
        tasks.close()


def current_tasks() -> RayTasks | None:
    """Return the Ray tasks of the enclosing `ray_tasks`, or None."""
    return _current.get()


class RayTasks:
    """Hands batches with candidates to Ray, at most `workers` at a time.

    Attributes:
        workers: Tasks at a time.
        done: Tasks that have come back.
    """

    def __init__(self, workers: int) -> None:
        self.workers, self.done = workers, 0
        self._threads = torch.get_num_threads()
        self._started = False
        self._engine: tuple[Engine, Any] | None = None  # kept, so that an id is not used twice
        self._remote: Any = None

    def run(
        self,
        engine: Engine,
        jobs: Iterator[tuple[int, Job]],
        finish: Callable[[int, Tensor, int], None],
    ) -> None:
        """Run jobs; call `finish(number, logits, block runs)` as each comes back, in any order."""
        ray = import_ray()
        waiting: dict[Any, int] = {}
        try:
            for number, job in jobs:
                if self._remote is None:
                    self._start(engine)
                waiting[self._remote.remote([self._place(engine)], job, self._threads)] = number
                while len(waiting) >= self.workers:
                    self._collect(waiting, engine, finish)
            while waiting:
                self._collect(waiting, engine, finish)
        finally:
            for task in waiting:  # of an error, or Ctrl-C
                ray.cancel(task, force=True)

    def close(self) -> None:
        """Stop Ray, if it was started here."""
        self._engine = self._remote = None
        if self._started:
            import_ray().shutdown()
            self._started = False

    def _start(self, engine: Engine) -> None:
        ray = import_ray()
        weights = sum(t.numel() * t.element_size() for t in engine.host.model.parameters())
        self._started = start_ray(
            self.workers * self._threads, store_bytes=2 * weights + 2**28 + self.workers * 2**26
        )
        self._remote = ray.remote(
            num_cpus=self._threads,
            num_gpus=1 if engine.device.type == "cuda" else 0,
            max_retries=RETRIES,
        )(climb_remotely)

    def _place(self, engine: Engine) -> Any:
        """Put an engine into the object store, once."""
        if self._engine is None or self._engine[0] is not engine:
            self._engine = (engine, import_ray().put(engine))
        return self._engine[1]

    def _collect(
        self,
        waiting: dict[Any, int],
        engine: Engine,
        finish: Callable[[int, Tensor, int], None],
    ) -> None:
        """Wait for one task and take its result."""
        ray = import_ray()
        ready, _ = ray.wait(list(waiting), num_returns=1)
        number = waiting.pop(ready[0])
        try:
            logits, runs, streams = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:  # what the task raised; its text is a log
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:300]
            raise HydraError(
                f"Batch {number} of a search was lost: its worker died {RETRIES + 1} times "
                f"({type(error).__name__}: {reason}). Give fewer workers or smaller batches if "
                "memory ran out."
            ) from error
        if streams < engine.streams:
            engine.streams = streams
            warnings.warn(
                f"Memory ran out in a worker: it went on with {streams} candidates at once.",
                stacklevel=2,
            )
        self.done += 1
        finish(number, logits, runs)


def climb_remotely(place: Sequence[Any], job: Job, threads: int) -> tuple[Tensor, int, int]:
    """Run a job in a worker; return its logits, the block runs and the candidates at once.

    Args:
        place: The engine in the object store; in a list, so that Ray does not unpack it each time.
        job: What to run.
        threads: Of torch.
    """
    ray = import_ray()
    torch.set_num_threads(threads)
    key = place[0].hex()
    if key not in _engines:
        _engines.clear()
        _engines[key] = ray.get(place[0])
    engine = _engines[key]
    runs: list[int] = []
    with evaluating(engine.host.model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody reads them here: what matters is returned
        logits = climb(engine, job.layer, job.x, job.call, job.above, job.edit, runs.append)
    return logits.float().cpu(), sum(runs), engine.streams
