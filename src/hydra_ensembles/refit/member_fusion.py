"""Members that part at the last linear layer of the last block, fused above one trunk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse
from ..fusion.member import share_parameters
from ..heads.head_mask import HeadMask
from ..hosts import host_model
from ..hosts.families import first_path
from ..hosts.probes import modules_after_blocks
from .readout_states import Parting, layer_scale
from .ridge import Linear


def one_stream(base: nn.Module, members: int, batch: Any) -> HydraEnsemble:
    """Fuse equal members, whose last block runs as a branch for the readout only."""
    masks, last = [HeadMask.full(base)] * members, len(host_model(base)) - 1
    return fuse(base, masks, branch_layer=last, batch=batch)


def fuse_by_states(
    base: nn.Module,
    hosts: Sequence[nn.Module],
    parting: Parting,
    linears: Sequence[Linear],
    batch: Any,
) -> HydraEnsemble:
    """Fuse members that are the trunk with their own last linear layer, norm and classifier."""
    members = [
        _member(base, host, parting, linear) for host, linear in zip(hosts, linears, strict=True)
    ]
    last = len(host_model(base)) - 1
    return fuse(members, average="first", branch_layer=last, batch=batch)


@torch.no_grad()
def _member(base: nn.Module, host: nn.Module, parting: Parting, linear: Linear) -> nn.Module:
    """Return the trunk with a member's last linear layer, and the host's own norm and classifier.

    All other parameters are the trunk's own tensors.
    """
    member = share_parameters(base)
    block = parting.block(member)
    layer, scale = copy.deepcopy(block.module.get_submodule(parting.second)), layer_scale(block)
    assert scale is not None
    linear.put_(layer, scale)
    block.module.set_submodule(parting.second, layer)
    if parting.family.norm == "post":
        norm = first_path(block.module, parting.family.norm2)
        assert norm is not None
        block.module.set_submodule(norm, parting.block(host).module.get_submodule(norm))
    for path in modules_after_blocks(host_model(base, family=parting.family)):
        member.set_submodule(path, host.get_submodule(path))
    return member
