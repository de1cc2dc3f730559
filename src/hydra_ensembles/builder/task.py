"""What a method of `build` works on."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.budget import Budget
from ..data.progress import announce, duration
from ..hosts import HostModel
from ..search.state import SearchState, TensorStore
from .parts import Parts


@dataclass(frozen=True)
class Task:
    """What a method works on.

    Attributes:
        host: The host model.
        parts: The data.
        members: Number of members M.
        budget: Bounds their counted cost.
        seed: Of everything random.
        state: Finished steps of this build.
        store: Keeps tensors of a stopped build; None keeps none.
        progress: Whether to report progress.
        batch_seconds: What the host took for one batch, measured.
    """

    host: HostModel
    parts: Parts
    members: int
    budget: Budget
    seed: int
    state: SearchState
    store: TensorStore | None
    progress: bool
    batch_seconds: float = 0.0

    def expect(self, batches: float, what: str) -> None:
        """Say how long work will take that is worth so many batches through the whole host."""
        length = duration(batches * self.batch_seconds)
        announce(
            f"{what}: about {length} (one batch takes {self.batch_seconds:.2g} s)",
            enabled=self.progress,
        )
