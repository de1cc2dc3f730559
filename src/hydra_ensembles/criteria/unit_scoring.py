"""`score_units`: scores of heads and neurons, in one pass over the calibration data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from torch import nn

from ..errors import HydraError
from ..heads.unit_scores import UnitScores
from ..hosts import HostModel, host_model
from .criterion import AttentionScore, CombinedScore, Criterion, Loss
from .head_scoring import asked_criteria, score_tables


@overload
def score_units(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: str | Criterion = "energy",
    loss: Loss | None = None,
    progress: bool = True,
) -> UnitScores: ...
@overload
def score_units(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: list[Any] | tuple[Any, ...],
    loss: Loss | None = None,
    progress: bool = True,
) -> dict[str, UnitScores]: ...
def score_units(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: str | Criterion | list[Any] | tuple[Any, ...] = "energy",
    loss: Loss | None = None,
    progress: bool = True,
) -> UnitScores | dict[str, UnitScores]:
    """Score how much each head and each neuron of a model matters (see `score_heads`).

    Args:
        model: A host model.
        data: Calibration batches, read once; `energy` needs no labels.
        criterion: `energy`, `fisher`, `his`, `taylor`, `magnitude`, `random`, a `Criterion` with
            options, or a list of them. Scores of attention (`entropy`, `hies`) know no neurons.
        loss: A function of logits and labels to one loss per sample `[batch]`.
        progress: Show a bar on a terminal.

    Returns:
        `UnitScores`; for a list of criteria, a dict of them by label. Rows of neurons that stay
        are empty.

    Example:
        >>> scores = score_units(model, calibration)
        >>> mask = choose_units(model, scores, max_cost=0.5, batch=batch)
    """
    several, asked = asked_criteria(criterion)
    for one in asked:
        if isinstance(one, (AttentionScore, CombinedScore)):
            raise HydraError(
                f"{one.label} scores attention, and neurons have none: choose energy, fisher, his, "
                "taylor, magnitude or random, or score only heads with score_heads()."
            )
    tables = score_tables(host_model(model), data, asked, loss, progress, neurons=True)
    scores = {one.label: UnitScores(tables[one][0], tables[one][1], one.label) for one in asked}
    return scores if several else scores[asked[0].label]
