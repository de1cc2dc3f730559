"""Members as parts of one host: disjoint shares of the last block's neurons, each refitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import without_labels
from ..data.processes import on_first
from ..errors import UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..hosts import HostModel
from .fold_rows import read_rows
from .member_fusion import fuse_by_states
from .readout_states import Parting
from .ridge import Fit, Linear, Moments, fit


@dataclass(frozen=True)
class PartedHost:
    """An ensemble whose members are parts of one host.

    Attributes:
        ensemble: The fused members.
        shares: The neurons of each.
        fits: How well each follows the host, by its own neurons.
        examples: Number of examples that they were fitted on.
    """

    ensemble: HydraEnsemble
    shares: list[Tensor]
    fits: list[Fit]
    examples: int


def shares_of(neurons: int, members: int, seed: int) -> list[Tensor]:
    """Deal neurons to members at random: disjoint shares that differ by at most one in size."""
    order = torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))
    return [share.sort().values for share in order.tensor_split(members)]


def part_host(
    host: HostModel, data: Any, *, members: int, seed: int = 0, progress: bool = True
) -> PartedHost:
    """Make members of the neurons of a host's last block, without training or labels.

    Let a be the state that enters the residual sum of the last block's MLP at the readout token,
    and u_m the activations of the neurons of member m. Its last linear layer is fitted by ridge
    regression to the host's own residual sum s:

        s_m = a + u_m W_m + b_m ~ s.

    On inputs like the data, members agree with the host and with each other. Elsewhere the fit does
    not hold, and each goes its own way. All members share the other weights, attention included.

    Args:
        host: The host; it is not changed.
        data: Inputs as the host takes them; labels are ignored.
        members: Number of members.
        seed: Seed of the shares; also determines which examples are held out to choose the ridge.
        progress: Show a bar on a terminal.

    Raises:
        UnsupportedModelError: When the host does not read a token, or has too few neurons.
        DataError: When the data has too few examples, NaN or infinity.

    Example:
        >>> parted = part_host(host_model(model), inputs, members=5)
        >>> parted.ensemble.predict(batch).mutual_information
    """
    if not host.readout.has_token:
        raise UnsupportedModelError(
            f"{host.name} has no members by parts: its classifier reads {host.readout}. Use "
            'method="select", whose members differ by heads.'
        )
    parting = Parting.of(host)
    own = parting.linear(host.model)
    if len(own.weight) < members:
        raise UnsupportedModelError(
            f"{host.name} has {len(own.weight)} neurons in its last block, too few for {members} "
            "members."
        )
    found = read_rows(
        {0: host.model},
        [host.model],
        parting,
        data,
        states=True,
        members=False,
        student=False,
        seed=seed,
        progress=progress,
    )
    rows = found.states[0]
    rows.flush_()
    assert rows.fitted is not None and rows.judging is not None
    shares = shares_of(len(own.weight), members, seed)
    fits, linears = [], []
    for share in shares:
        given = Linear(own.weight[share], own.bias)
        fitted, judging = (_restricted(part, share) for part in (rows.fitted, rows.judging))
        fits += on_first(partial(fit, fitted, judging, [given]))
        weight = torch.zeros_like(own.weight).index_copy_(0, share, fits[-1].linear.weight)
        linears.append(Linear(weight, fits[-1].linear.bias))
    batch = without_labels(next(iter(data)))
    ensemble = fuse_by_states(host.model, [host.model] * members, parting, linears, batch)
    return PartedHost(ensemble, shares, fits, found.examples)


def _restricted(rows: Moments, units: Tensor) -> Moments:
    """Return the moments of some of the features."""
    return replace(rows, u=rows.u[units], uu=rows.uu[units][:, units], uy=rows.uy[units])
