"""Methods of `build` whose members are fitted by least squares: parts of one host, and folding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from ..costs.budget import SLACK
from ..costs.formula import cost
from ..data.batches import without_labels
from ..errors import MaskError
from ..fusion.ensemble import HydraEnsemble
from ..refit.fold_members import fold
from ..refit.member_fusion import fuse_by_states
from ..refit.part_members import part_host
from ..refit.readout_states import Parting
from ..training.teachers import How, make_teachers
from .data_parts import BuildJob, Outcome
from .methods import METHODS


@METHODS.register("parts")
@dataclass(frozen=True)
class Parts:
    """Deal the last block's neurons to the members; least squares lets each follow the host.

    Members share all heads and part at the last linear layer, at the token that the classifier
    reads. The fit needs no labels; `build` uses those of the calibration data for temperatures.
    """

    name: ClassVar[str] = "parts"
    members: ClassVar[int | None] = 5
    proxies: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {}

    def find(self, job: BuildJob) -> Outcome:
        """Fit the members on the selecting data."""
        first = without_labels(job.parts.data["select"].batch(0))
        if job.budget.limit < 1 and job.host.readout.has_token:  # known before anything is fitted
            parting = Parting.of(job.host)
            own = [parting.linear(job.host.model)] * job.members
            hosts = [job.host.model] * job.members
            counted(fuse_by_states(job.host.model, hosts, parting, own, first), job, first)
        found = part_host(
            job.host,
            job.parts.data["select"],
            members=job.members,
            seed=job.seed,
            progress=job.progress,
        )
        return Outcome(
            {
                "cost": counted(found.ensemble, job, first),
                "branch_layers": [len(job.host) - 1],
                "neurons": [len(share) for share in found.shares],
                "fits": [
                    {
                        "ridge": one.ridge,
                        "error": one.error,
                        "error without refitting": one.given_error,
                    }
                    for one in found.fits
                ],
            },
            found.ensemble,
        )


@METHODS.register("fold")
@dataclass(frozen=True)
class Fold:
    """Fine-tune teachers of the host on the selecting data, and fold them into one model.

    The only method that trains: a Deep Ensemble of one start, at the cost of one model. A stopped
    build goes on from the teachers' checkpoints.

    Attributes:
        how: How teachers are made; see `make_teachers`.
        epochs, learning_rate: Of each teacher; None for the defaults of `how`.
        readout: Members by `"states"` or `"logits"`; see `fold`.
    """

    name: ClassVar[str] = "fold"
    members: ClassVar[int | None] = 3
    proxies: ClassVar[bool] = False
    how: How = "full"
    epochs: int | None = None
    learning_rate: float | None = None
    readout: Literal["states", "logits"] = "states"

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return asdict(self)

    def find(self, job: BuildJob) -> Outcome:
        """Make teachers, then fold them."""
        data, path = job.parts.data["select"], job.state.path
        teachers = make_teachers(
            job.host,
            data,
            count=job.members,
            how=self.how,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            seed=job.seed,
            folder=None if path is None else path.parent / "teachers",
            progress=job.progress,
        )
        ensemble = fold(
            teachers,
            data,
            readout=self.readout,
            student=False,
            max_cost=job.budget.limit,
            seed=job.seed,
            progress=job.progress,
        )
        record = ensemble.record
        return Outcome(
            {
                "cost": counted(ensemble, job, without_labels(data.batch(0))),
                "branch_layers": [len(job.host) - 1],
                "fits": record["members"],
                "fold": record,
            },
            ensemble,
        )


def counted(ensemble: HydraEnsemble, job: BuildJob, batch: Any) -> float:
    """Return an ensemble's counted cost relative to the host; raise if it exceeds the budget."""
    ratio = cost(ensemble, batch).relative_to(cost(job.host.model, batch)).multiply_adds
    if ratio > job.budget.limit + SLACK:
        raise MaskError(
            f"{ensemble.members} members cost {ratio:.3f} x, more than max_cost="
            f"{job.budget.max_cost}. Take fewer members or a higher max_cost."
        )
    return ratio
