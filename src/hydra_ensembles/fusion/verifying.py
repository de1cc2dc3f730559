"""Check that a fused model computes what its members would, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.modes import in_eval, twin
from ..data.running import call_model
from ..errors import VerificationError
from ..hosts import host_model, main_output
from .body import Body


@dataclass(frozen=True)
class Verification:
    """What `verify` found: largest absolute differences of the members' logits."""

    largest: float
    by_member: tuple[float, ...]
    tolerance: float

    def __str__(self) -> str:
        members = ", ".join(f"{d:.2g}" for d in self.by_member)
        return (
            f"fused == one by one: largest difference {self.largest:.2g} "
            f"(members {members}; tolerance {self.tolerance:g})"
        )


@torch.no_grad()
def verify(
    ensemble: Any,
    batch: Any,
    *,
    tolerance: float = 1e-5,
    members: Sequence[nn.Module] | None = None,
) -> Verification:
    """Compare a fused ensemble with its members run one by one, on a batch.

    Args:
        ensemble: A `HydraEnsemble`.
        batch: A batch in the host's form.
        tolerance: Largest absolute difference of logits that is allowed, times their scale where
            that is above one.
        members: Plain models to compare with; by default the members cast from the ensemble, run by
            the host library's own code.

    Raises:
        VerificationError: With the largest difference and the first layer at which the two part.
    """
    ensemble = twin(ensemble).eval()  # its mode is its own: the caller's stays as it is
    ensemble.mode = "fused"
    fused = ensemble.member_logits(batch)
    models = members or [ensemble.member(m) for m in range(ensemble.members)]
    one_by_one = torch.stack([main_output(call_model(in_eval(m), batch)) for m in models], 1)
    differences = (fused - one_by_one).abs().flatten(2).amax(dim=(0, 2))
    allowed = tolerance * max(1.0, float(one_by_one.abs().max()))
    largest = float(differences.max())
    if not largest <= allowed:  # NaN fails too
        member = int(differences.nan_to_num(float("inf")).argmax())
        where = _first_parting(ensemble, models[member], member, batch, allowed)
        raise VerificationError(
            f"Fused and one by one differ by {largest:.3g} in member {member} (allowed "
            f"{allowed:.3g}); they part {where}. Please report this with "
            "str(explain(model)) and the masks."
        )
    return Verification(largest, tuple(float(d) for d in differences), tolerance)


def _first_parting(ensemble: Any, model: nn.Module, member: int, batch: Any, allowed: float) -> str:
    """Say at which layer a member's states in the fused model leave the member's own."""
    body: Body = ensemble.body
    fused = _fused_states(ensemble, body, batch)
    own = _own_states(model, batch)
    plan = body.plan
    stream = plan.ends[plan.streams[member]]
    streams = []
    for layer in reversed(plan.layers):
        streams.append(stream)
        stream = layer.parents[stream]
    places = [0] * plan.trunk + streams[::-1]
    for depth, (ours, theirs, place) in enumerate(zip(fused, own, places, strict=False)):
        part = ours.chunk(ours.shape[0] // theirs.shape[0])[place]
        if part.shape[1] != theirs.shape[1]:  # readout tokens only
            if body.readout.tokens is None:
                continue
            theirs = theirs[:, : part.shape[1]]
        difference = float((part - theirs).abs().max())
        if not difference <= allowed:
            return f"at layer {depth} (states differ there by {difference:.3g})"
    return "after the last layer, in the readout or the classifier"


def _fused_states(ensemble: Any, body: Body, batch: Any) -> list[Tensor]:
    states: list[Tensor] = []
    with body.told(states=states):
        ensemble.member_logits(batch)
    return states


def _own_states(model: nn.Module, batch: Any) -> list[Tensor]:
    states: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.module.register_forward_hook(note) for block in host_model(model).blocks]
    try:
        call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return states
