"""Candidate masks and their validation logits: what selection chooses from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..heads.masks import HeadMask
from .climbing import Tick
from .prefix import Outputs, Prefix
from .state import TensorStore


class Candidates:
    """Candidate masks and their logits above a cached trunk, computed once.

    Args:
        prefix: Cached states; it is advanced to the first layer in which candidates differ.
        pool: Masks and their origins; the first is the unpruned host.
        tick: Called with the number of finished block runs.
        store: Stores logits, so that a stopped search need not recompute them.
    """

    def __init__(
        self,
        prefix: Prefix,
        pool: Mapping[HeadMask, str],
        *,
        tick: Tick | None = None,
        store: TensorStore | None = None,
    ) -> None:
        self.prefix, self.tick, self.store = prefix, tick, store
        self.origins: dict[HeadMask, str] = {}
        self.outputs = Outputs({}, {})
        self.add(pool)

    @property
    def masks(self) -> list[HeadMask]:
        """The candidates, in the order of their logits."""
        return list(self.origins)

    def add(self, pool: Mapping[HeadMask, str]) -> None:
        """Compute the logits of more candidates."""
        new = {mask: origin for mask, origin in pool.items() if mask not in self.origins}
        if not new:
            return
        label = f"candidates-{len(self.origins)}-{len(self.origins) + len(new)}"
        outputs = self._arrange(
            self.prefix.logits(list(new), tick=self.tick, store=self.store, label=label)
        )
        before = self.outputs.logits
        self.outputs = Outputs(
            {
                name: torch.cat([before[name], logits], 1) if name in before else logits
                for name, logits in outputs.logits.items()
            },
            outputs.labels,
        )
        self.origins.update(new)

    def _arrange(self, outputs: Outputs) -> Outputs:
        """Arrange logits by the data sets that selection uses."""
        return outputs


class PartCandidates(Candidates):
    """Candidates on data sets in parts `<part>:<name>`, joined by name."""

    def _arrange(self, outputs: Outputs) -> Outputs:
        return Outputs(joined(outputs.logits), joined(outputs.labels))

    def rows(self, part: str) -> dict[str, Tensor]:
        """Return the examples of a part, by data set."""
        result, starts = {}, dict.fromkeys(self.outputs.logits, 0)
        for key, count in self.prefix.examples.items():
            where, _, name = key.partition(":")
            if where == part:
                result[name] = torch.arange(starts[name], starts[name] + count)
            starts[name] += count
        return result


def joined(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join data sets `<part>:<name>` by name, in the order of the parts."""
    by_name: dict[str, list[Tensor]] = {}
    for key, tensor in parts.items():
        by_name.setdefault(key.partition(":")[2], []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in by_name.items()}
