"""Check that a fused model computes what its members would, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.eval_mode import evaluating, in_eval, twin
from ..data.model_runs import call_model, output_of
from ..errors import UnsupportedModelError, VerificationError
from ..heads.gates import gate
from ..heads.head_mask import HeadMask
from ..hosts import Family, HostModel, host_model
from ..hosts.block_calls import Inputs, states_of
from ..hosts.host_data import batch_for
from .known_data import run_of
from .linear_readout import TappedHost

if TYPE_CHECKING:
    from .body import Body
    from .ensemble import HydraEnsemble
    from .fused_model import FusedModel
    from .host_engine import HostedBody

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest difference that rounding explains, relative to the logits' scale if above one."""


@dataclass(frozen=True)
class Reference:
    """One member run by the host library: a plain host, and the heads that it keeps."""

    host: HostModel
    mask: HeadMask

    def logits(self, inputs: Inputs) -> Tensor:
        """Run the host's own code with all other heads gated off."""
        with evaluating(self.host.model), gate(self.host, self.mask):
            return self.host.read(self.host.model(*inputs[0], **inputs[1]))


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the tolerance for a data type."""
    return TOLERANCES.get(dtype, 1e-5)


def check_against(ensemble: FusedModel, references: Iterable[Reference], inputs: Inputs) -> None:
    """Compare a fused ensemble with its members, run by the host library's own code with gates.

    Ten times the tolerance of `verify` is allowed: a deep host accumulates more rounding, and real
    errors are far larger.

    Raises:
        VerificationError: When a member differs.
    """
    with torch.no_grad():
        fused = in_eval(ensemble).fused_logits(*inputs)
    allowed = 10 * tolerance_of(ensemble.dtype)
    before: Reference | None = None
    for member, reference in enumerate(references):
        if reference != before:  # equal members are adjacent
            expected, before = reference.logits(inputs), reference
        if fused[:, member].shape != expected.shape:
            raise VerificationError(
                f"The fused model returns shape {tuple(fused[:, member].shape)} for member "
                f"{member}, its host {tuple(expected.shape)}."
            )
        difference = float((fused[:, member] - expected).abs().max())
        bound = allowed * max(1.0, float(expected.abs().max()))
        if not difference <= bound:  # NaN fails too
            raise VerificationError(
                f"Member {member} of the fused model differs by {difference:.3g} from the host "
                f"with the same heads gated off (allowed {bound:.3g})."
            )


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
    ensemble: HydraEnsemble,
    batch: Any,
    *,
    tolerance: float | None = None,
    members: Sequence[nn.Module] | None = None,
) -> Verification:
    """Compare a fused ensemble with its members run one by one, on a batch.

    Members that are linear readouts, and a student, are compared with features @ W + b, where the
    features come from the trunk as a plain host.

    Returns:
        The largest differences, if all of them are within the tolerance.

    Args:
        ensemble: A `HydraEnsemble`.
        batch: A batch in the host's form.
        tolerance: Largest allowed absolute difference of logits, times their scale if that is above
            one; by default what rounding explains in the ensemble's type (1e-5 in float32, 0.05 in
            bfloat16).
        members: Plain models to compare with; by default the ensemble's members, run by the host
            library's own code.

    Raises:
        VerificationError: With the largest difference and the first layer at which the two differ.

    Example:
        >>> print(hydra.verify(ensemble, batch))
        fused == one by one: largest difference 4.8e-07 (members 3.6e-07, 4.8e-07; tolerance 1e-05)
    """
    if not hasattr(ensemble, "member_logits"):
        raise UnsupportedModelError(
            f"Expected a HydraEnsemble, as fuse() or build() make it; found a "
            f"{type(ensemble).__name__}."
        )
    tolerance = tolerance_of(ensemble.dtype) if tolerance is None else tolerance
    ensemble = twin(ensemble).eval()  # a twin: the caller's mode does not change
    ensemble.mode = "fused"
    batch = batch_for(ensemble, batch)
    run = run_of(ensemble, batch, summaries=False)
    fused = run.member_logits
    by_readout, student = _linear_logits(ensemble, batch)
    models = members
    if members is None and by_readout is None:
        models = [ensemble.member(m) for m in range(ensemble.members)]
    if models is None:
        assert by_readout is not None
        one_by_one = by_readout
    else:
        one_by_one = torch.stack([output_of(in_eval(m), batch) for m in models], 1)
    differences = (fused - one_by_one).abs().flatten(2).amax(dim=(0, 2))
    allowed = tolerance * max(1.0, float(one_by_one.abs().max()))
    largest = float(differences.max())
    if student is not None and run.student_logits is not None:
        apart = float((run.student_logits - student).abs().max())
        if not apart <= tolerance * max(1.0, float(student.abs().max())):
            raise VerificationError(
                f"The student differs by {apart:.3g} between the fused model and the trunk run by "
                "its host library. Please report this with str(explain(model))."
            )
        largest = max(largest, apart)
    if not float(differences.max()) <= allowed:  # NaN fails too
        member = int(differences.nan_to_num(float("inf")).argmax())
        where = "in the features of the last block"
        if models is not None:
            where = _first_parting(ensemble, models[member], member, batch, allowed)
        raise VerificationError(
            f"Member {member} differs by {largest:.3g} between the fused model and the member run "
            f"alone (allowed {allowed:.3g}), first {where}. Please report this with "
            "str(explain(model)) and the masks."
        )
    return Verification(largest, tuple(float(d) for d in differences), tolerance)


def _linear_logits(ensemble: HydraEnsemble, batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return what linear readouts give on the trunk's own run: members' and student's logits."""
    body = ensemble.body
    readouts = body.readouts
    if readouts is None:
        return None, None
    trunk = ensemble._cast_member(0)
    run = TappedHost(trunk, body.family, body.readout, readouts.second, readouts.pooling)
    return readouts(run(batch)[1].features())


def _first_parting(
    ensemble: HydraEnsemble, model: nn.Module, member: int, batch: Any, allowed: float
) -> str:
    """Say at which layer the fused model's states first differ from the member's own."""
    body = ensemble.body
    fused = _fused_states(ensemble, body, batch)
    expected = _own_states(model, body.family, batch)
    if not fused:
        return "in one of the host's own blocks"
    places = [body.plan.stream_of(layer, member) for layer in range(body.plan.depth)]
    for depth, (ours, theirs, place) in enumerate(zip(fused, expected, places, strict=False)):
        part = ours.chunk(ours.shape[0] // theirs.shape[0])[place]
        if part.shape[1] != theirs.shape[1]:  # readout tokens only
            if body.readout.tokens is None:
                continue
            theirs = theirs[:, : part.shape[1]]
        difference = float((part - theirs).abs().max())
        if not difference <= allowed:
            return f"at layer {depth} (states differ there by {difference:.3g})"
    return "after the last layer, in the readout or the classifier"


def _fused_states(ensemble: HydraEnsemble, body: Body | HostedBody, batch: Any) -> list[Tensor]:
    states: list[Tensor] = []
    with body.options(states=states):
        ensemble.member_logits(batch)
    return states


def _own_states(model: nn.Module, family: Family, batch: Any) -> list[Tensor]:
    states: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(states_of(output)[0])

    handles = [
        block.module.register_forward_hook(note)
        for block in host_model(model, family=family).blocks
    ]
    try:
        call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return states
