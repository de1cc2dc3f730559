"""Methods of `build` whose members are fitted by least squares: parts of one host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..costs.budget import SLACK
from ..costs.formula import cost
from ..data.batches import without_labels
from ..errors import MaskError
from ..fusion.ensemble import HydraEnsemble
from ..refit.part_members import part_host
from .data_parts import Outcome, Task
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

    def find(self, task: Task) -> Outcome:
        """Fit the members on the selecting data."""
        found = part_host(
            task.host,
            task.parts.data["select"],
            members=task.members,
            seed=task.seed,
            progress=task.progress,
        )
        first = without_labels(task.parts.data["select"].batch(0))
        return Outcome(
            {
                "cost": counted(found.ensemble, task, first),
                "branch_layers": [len(task.host) - 1],
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


def counted(ensemble: HydraEnsemble, task: Task, batch: Any) -> float:
    """Return an ensemble's counted cost relative to the host; raise if it exceeds the budget."""
    ratio = cost(ensemble, batch).relative_to(cost(task.host.model, batch)).multiply_adds
    if ratio > task.budget.limit + SLACK:
        raise MaskError(
            f"{ensemble.members} members cost {ratio:.3f} x, more than max_cost="
            f"{task.budget.max_cost}. Take fewer members or a higher max_cost."
        )
    return ratio
