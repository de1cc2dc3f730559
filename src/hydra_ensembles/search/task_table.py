"""Candidates of tasks that have no single class per example: ensembles are scored by their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .candidate_table import Figures, Table
from .trunk_cache import Outputs


def table_of(outputs: Outputs) -> Table:
    """Return the table of the outputs' task."""
    return Table(outputs) if outputs.task.classifies else TaskTable(outputs)


class TaskTable(Table):
    """Outputs of all candidates; an ensemble's mean is computed when it is asked for.

    `Figures.nll` is the task's loss, also `nll_scaled`; there is no accuracy.

    Args:
        outputs: Outputs of all candidates on `"id"` and `"ood/..."`.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return self.outputs.logits["id"].shape[1]

    @property
    def families(self) -> list[str]:
        """Names of the outlier families."""
        return [name for name in self.outputs.logits if name.startswith("ood")]

    def sizes(self) -> dict[str, int]:
        """Number of examples by data set."""
        return {name: len(logits) for name, logits in self.outputs.logits.items()}

    def take(self, rows: Mapping[str, Tensor]) -> Table:
        """Return the given examples of the data sets in `rows`."""
        return TaskTable(self.outputs.examples(rows))

    def only(self, candidates: Sequence[int]) -> Table:
        """Return some candidates."""
        index, outputs = list(candidates), self.outputs
        logits = {name: values[:, index] for name, values in outputs.logits.items()}
        return TaskTable(Outputs(logits, outputs.labels, outputs.task))

    def figures(self, members: Sequence[int], *, scores: Sequence[str] = ("msp",)) -> Figures:
        """Score an ensemble of candidates by its loss and by uncertainty scores."""
        index, outputs = list(members), self.outputs
        chosen = Outputs(
            {name: values[:, index].float() for name, values in outputs.logits.items()},
            outputs.labels,
            outputs.task,
        )
        auroc: dict[str, dict[str, float]] = {name: {} for name in self.families}
        for score in scores if auroc else ():
            inliers = chosen.score("id", score).sort().values
            for family in auroc:
                other = chosen.score(family, score)
                low = torch.searchsorted(inliers, other)
                high = torch.searchsorted(inliers, other, right=True)
                auroc[family][score] = float((low + high).double().mean()) / (2 * len(inliers))
        loss = float(chosen.losses("id").double().mean())
        return Figures(auroc, loss, loss, 0.0)

    def grown(
        self, have: Sequence[int], pool: Sequence[int], *, scores: Sequence[str] = ("msp",)
    ) -> list[Figures]:
        """Score `have` plus each candidate of a pool."""
        return [self.figures((*have, new), scores=scores) for new in pool]
