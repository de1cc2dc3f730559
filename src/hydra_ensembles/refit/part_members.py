"""Members as parts of one host: disjoint shares of the last block's neurons, each refitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..hosts import HostModel
from .fold_members import member_of, read_rows
from .readout_states import Parting, why_not_parted
from .ridge import Fit, Linear, Moments, fit


@dataclass(frozen=True)
class PartedMembers:
    """Members that are parts of one host.

    Attributes:
        models: Plain hosts that share all weights but their last linear layer.
        shares: The neurons of each.
        fits: How well each follows the host.
        examples: Number of examples that they were fitted on.
    """

    models: list[nn.Module]
    shares: list[Tensor]
    fits: list[Fit]
    examples: int


def shares_of(neurons: int, members: int, seed: int) -> list[Tensor]:
    """Deal neurons to members at random: disjoint shares that differ by at most one in size."""
    order = torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))
    return [share.sort().values for share in order.tensor_split(members)]


def part_members(
    host: HostModel, data: Any, *, members: int, seed: int = 0, progress: bool = True
) -> PartedMembers:
    """Make members of the neurons of a host's last block, without training or labels.

    Let a be the state that enters the residual sum of the last block's MLP at the readout token,
    and u_m the activations of the neurons of member m. Its last linear layer is fitted by ridge
    regression to the host's own residual sum s:

        s_m = a + u_m W_m + b_m ~ s.

    Where the data carries u_m, members agree with the host; elsewhere each continues in its own
    way. All members share the other weights, attention included.

    Args:
        host: The host; it is not changed.
        data: Inputs as the host takes them; labels are ignored.
        members: Number of members.
        seed: Seed of the shares; also determines which examples are held out to choose the ridge.
        progress: Show a bar on a terminal.

    Example:
        >>> members = part_members(host_model(model), inputs, members=5)
        >>> ensemble = fuse(members.models, average="first")
    """
    reason = why_not_parted(host)
    if reason is not None:
        raise UnsupportedModelError(
            f'{host.name} has no members by parts: {reason}. Use method="select", whose members '
            "differ by heads."
        )
    parting = Parting.of(host)
    own = parting.linear(host.model)
    if len(own.weight) < members:
        raise UnsupportedModelError(
            f"{host.name} has {len(own.weight)} neurons in its last block, too few for {members} "
            "members."
        )
    rows = read_rows(host.model, [host.model], parting, data, seed=seed, progress=progress)
    assert rows.fitted is not None and rows.judging is not None
    shares = shares_of(len(own.weight), members, seed)
    fits, models = [], []
    for share in shares:
        given = Linear(own.weight[share], own.bias)
        found = fit(_restricted(rows.fitted, share), _restricted(rows.judging, share), [given])[0]
        weight = torch.zeros_like(own.weight).index_copy_(0, share, found.linear.weight)
        linear = Linear(weight, found.linear.bias)
        models.append(member_of(host.model, host.model, parting, linear))
        fits.append(found)
    return PartedMembers(models, shares, fits, rows.examples)


def _restricted(rows: Moments, units: Tensor) -> Moments:
    """Return the moments of some of the features."""
    return replace(rows, u=rows.u[units], uu=rows.uu[units][:, units], uy=rows.uy[units])
