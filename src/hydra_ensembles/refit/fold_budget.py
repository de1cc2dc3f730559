"""What folding costs before anything is fitted, and a trunk pruned until it is within a budget."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from ..costs import choose_units, cost
from ..costs.budget import SLACK
from ..criteria import score_units
from ..errors import MaskError
from ..fusion.linear_readout import LinearReadout, Readouts
from ..heads import prune_units_
from .member_fusion import fuse_by_states, one_stream
from .readout_states import Parting, Reader
from .unit_pruning import refitted_

STEPS = 7
"""Halvings of the range of shares to which a trunk may be pruned."""


class Price:
    """Counts what hosts folded on a trunk cost, relative to one host.

    Args:
        hosts: The hosts.
        parting: Where members branch.
        readout: Members by `"states"` or by `"logits"`.
        student: Whether there is a student.
        batch: A batch without labels; only its shapes matter.
    """

    def __init__(
        self,
        hosts: Sequence[nn.Module],
        parting: Parting,
        readout: Literal["states", "logits"],
        student: bool,
        batch: Any,
    ) -> None:
        self.hosts, self.parting, self.batch = hosts, parting, batch
        self.by_states, self.student = readout == "states", student
        self._whole = cost(hosts[0], batch)

    def __call__(self, trunk: nn.Module) -> float:
        """Fuse members that are not fitted on a trunk, and count."""
        parting, count = self.parting, len(self.hosts)
        if self.by_states:
            linears = [parting.linear(trunk)] * count
            ensemble = fuse_by_states(trunk, self.hosts, parting, linears, self.batch)
        else:
            ensemble = one_stream(trunk, count, self.batch)
        if self.student or not self.by_states:
            seen = Reader(trunk, parting)(self.batch)
            sizes, dtype = (seen.logits.shape[1], seen.readout.shape[1]), ensemble.dtype
            members = None if self.by_states else LinearReadout(count, *sizes).to(dtype)
            student = LinearReadout(1, *sizes).to(dtype) if self.student else None
            ensemble.attach_readouts_(
                Readouts(parting.second, members=members, student=student, pooling=parting.pooling)
            )
        return cost(ensemble, self.batch).relative_to(self._whole).multiply_adds


def within_budget(
    trunk: nn.Module, data: Any, price: Price, max_cost: float, *, seed: int, progress: bool
) -> nn.Module:
    """Prune a trunk as little as the budget of what is folded on it asks, and refit it.

    Units are scored once; the share that the trunk keeps is found by halving, since what is folded
    on it does not cost the same share.

    Raises:
        MaskError: The budget cannot be met.
    """
    scores = score_units(trunk, data, progress=progress)
    low, high = 0.0, 1.0
    kept, why = None, ""
    for _ in range(STEPS):
        share = (low + high) / 2
        try:
            mask = choose_units(trunk, scores, max_cost=share, batch=price.batch)
        except MaskError as error:
            low, why = share, f" {error}"
            continue
        if price(prune_units_(copy.deepcopy(trunk), mask)) <= max_cost + SLACK:
            low, kept = share, mask
        else:
            high = share
    if kept is None:
        raise MaskError(f"max_cost={max_cost} cannot be met, however far the trunk is pruned.{why}")
    pruned = prune_units_(copy.deepcopy(trunk), kept)
    refitted_(pruned, trunk, data, [], folder=None, seed=seed, show=progress)
    return pruned
