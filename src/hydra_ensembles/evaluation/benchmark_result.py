"""What a benchmark measured: timings by round, paired ratios with intervals, a table, JSON.

Peak memory of a call on a CPU, measured where operators allocate their results.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._records import read_record, to_record
from .._tables import markdown_table
from ..errors import DataError
from .intervals import Interval, bootstrap


class PeakMemory(TorchDispatchMode):
    """Track the bytes of tensors that are born while it is active, as long as they live.

    What an operator allocates for itself and frees before it returns is not seen.

    Attributes:
        peak: The largest number of bytes that were alive at once.
        alive: Bytes alive now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in leaves}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._known:
                continue  # a view, or written in place
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@dataclass(frozen=True)
class Timing:
    """One model at one batch size.

    Attributes:
        name: The model's.
        batch_size: Samples in a call.
        seconds: Seconds per call, one number per round.
        multiply_adds: Counted, for this batch.
        weight_bytes: Bytes of the weights in memory.
        activation_bytes: Peak of what a call adds to them.
    """

    name: str
    batch_size: int
    seconds: tuple[float, ...]
    multiply_adds: int
    weight_bytes: int
    activation_bytes: int

    @property
    def latency(self) -> float:
        """Median seconds of a call."""
        return float(torch.tensor(self.seconds, dtype=torch.float64).quantile(0.5))

    @property
    def spread(self) -> float:
        """Half of the interquartile range of the seconds, relative to their median."""
        values = torch.tensor(self.seconds, dtype=torch.float64)
        low, high = values.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
        return (high - low) / 2 / self.latency

    @property
    def throughput(self) -> float:
        """Samples per second, at the median."""
        return self.batch_size / self.latency

    @property
    def peak_bytes(self) -> int:
        """Weights and activations together."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True)
class BenchmarkResult:
    """Timings of models that ran interleaved; ratios are to the first model.

    Attributes:
        timings: One for every model and batch size.
        settings: Device, dtype, threads and what else belongs to the figures.
    """

    timings: tuple[Timing, ...]
    settings: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Models, in order; the first is the reference."""
        return list(dict.fromkeys(timing.name for timing in self.timings))

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes, in order."""
        return list(dict.fromkeys(timing.batch_size for timing in self.timings))

    def __getitem__(self, key: tuple[str, int]) -> Timing:
        for timing in self.timings:
            if (timing.name, timing.batch_size) == key:
                return timing
        raise DataError(
            f"No timing of {key[0]!r} at batch {key[1]}: there are {', '.join(self.names)} at "
            f"{', '.join(map(str, self.batch_sizes))}."
        )

    def ratio(self, name: str, batch_size: int) -> Interval:
        """Return the median over rounds of the paired latency ratios, with a bootstrap interval."""
        base = self[self.names[0], batch_size].seconds
        return paired_ratio(self[name, batch_size].seconds, base)

    def counted(self, name: str, batch_size: int) -> float:
        """Return the ratio of counted multiply-adds."""
        base = self[self.names[0], batch_size].multiply_adds
        return self[name, batch_size].multiply_adds / max(1, base)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain record per model and batch size."""
        return [
            {
                "name": t.name,
                "batch_size": t.batch_size,
                "rounds": len(t.seconds),
                "latency": t.latency,
                "spread": t.spread,
                "throughput": t.throughput,
                "ratio": self.ratio(t.name, t.batch_size)._asdict(),
                "counted_ratio": self.counted(t.name, t.batch_size),
                "multiply_adds": t.multiply_adds,
                "weight_bytes": t.weight_bytes,
                "activation_bytes": t.activation_bytes,
            }
            for t in self.timings
        ]

    def table(self) -> str:
        """Return an aligned Markdown table, which also reads well in a terminal."""
        ratio = f"x {self.names[0]} [95 %]"
        head = ("model", "batch", ratio, "counted", "ms", "± IQR/2", "samples/s", "MiB")
        body = [
            (
                t.name,
                str(t.batch_size),
                str(self.ratio(t.name, t.batch_size)),
                f"{self.counted(t.name, t.batch_size):.3f}",
                f"{1e3 * t.latency:.1f}",
                f"{t.spread:.1%}",
                f"{t.throughput:.1f}",
                f"{t.peak_bytes / 2**20:.0f}",
            )
            for t in self.timings
        ]
        return markdown_table([head, *body])

    def __str__(self) -> str:
        facts = self.settings
        shared = f"{facts.get('dtype')} on {facts.get('device')}, {facts.get('threads')} threads"
        rounds = sorted({len(t.seconds) for t in self.timings})
        return (
            f"{shared}, torch {facts.get('torch')}; {'-'.join(map(str, rounds))} interleaved "
            f"rounds; paired ratios to {self.names[0]!r}\n{self.table()}"
        )

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the result as JSON; write it to `path` (beside, then renamed) when given."""
        payload = {
            "settings": self.settings,
            "timings": [asdict(timing) for timing in self.timings],
            "rows": self.rows(),
        }
        return to_record("BenchmarkResult", payload, path, indent=1)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> BenchmarkResult:
        """Read what `to_json` wrote, from a file or from text."""
        payload = read_record("BenchmarkResult", source)
        timings = [Timing(**{**t, "seconds": tuple(t["seconds"])}) for t in payload["timings"]]
        return cls(tuple(timings), payload["settings"])


def paired_ratio(seconds: Sequence[float], base: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median of the ratios round by round, resampled over rounds."""
    pairs = [a / b for a, b in zip(seconds, base, strict=True)]
    return bootstrap(pairs, lambda draws: draws.quantile(0.5, dim=1), seed=seed)
