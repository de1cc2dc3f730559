"""Fit sets with a guarantee on labelled data (`uncertainty.set_fit`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..data.class_names import check_class_order
from ..data.progress import progress_bar
from ..errors import DataError, UnsupportedModelError
from ..prediction import Prediction, join
from ..prediction_sets import Sets
from ..registry import check_name
from ..tasks import IGNORED, task_of
from ..uncertainty import choose_sets
from .known_data import known_inputs
from .policy_data import SHARED, answer_of


def fit_sets(
    ensemble: Any,
    held_out: Iterable[Any],
    *,
    coverage: float = 0.9,
    method: str | None = None,
    groups: str | Sequence[Any] | None = None,
    randomised: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Sets:
    """Fit sets of what may be right, with a guaranteed coverage; set `ensemble.sets`.

    `predict` then has the set of each input (`Prediction.set`), and the rule is saved with the
    ensemble. The page on sets says what is guaranteed for each task and what is not: it holds for
    data like the held-out examples, on average, and not for inputs that are new.

    Args:
        ensemble: A `HydraEnsemble`, or any model that `evaluate` takes (the sets are returned and
            not kept).
        held_out: A few hundred labelled examples from the distribution to be predicted, not used to
            train the model, choose its heads or fit novelty.
        coverage: Share of inputs whose set holds what is right; of several labels, the share of the
            true ones that is held; of tokens, the share of a text's tokens. At least
            coverage / (1 - coverage) examples are needed: 9 for 0.9, 99 for 0.99.
        method: Classes: `"lac"`, `"aps"` or `"raps"`; several labels, spans and tokens: `"lac"`
            (tokens also `"aps"`); numbers: `"normalised"` or `"plain"`. By default the first.
        groups: `"class"` for the coverage of each class, or one name for each held-out example for
            that of each group; then name the groups of inputs too, by `answer.in_groups(names)`,
            or get the largest sets. What has too few examples shares the threshold of all.
        randomised: For `"aps"` and `"raps"`: exact coverage and smaller sets by a number that is
            made of the input's own probabilities, so that every call gives the same set.
        seed: Of that number, and of the share of the examples (a fifth for `"raps"`, a third for
            `"normalised"`) on which the method's options are chosen.
        progress: Show a bar on a terminal.

    Example:
        >>> sets = fit_sets(ensemble, held_out, coverage=0.95)
        >>> ensemble.predict(batch).set
        [['cat'], ['dog', 'wolf']]
    """
    task = task_of(ensemble)
    if not task.sets:
        raise UnsupportedModelError(
            f"{task.title.capitalize()} has no sets with a guarantee: there is no label that a set "
            "could hold. Novelty and its false-alarm rate work: fit_policy(risk=None)."
        )
    chosen = task.sets[0] if method is None else method
    check_name("method", chosen, task.sets)
    check_class_order(ensemble, held_out)
    answers: list[Prediction] = []
    labels: list[Tensor] = []
    shared = 0
    bar = progress_bar(held_out, description="sets", enabled=progress)
    for number, batch in enumerate(bar):
        where = f"batch {number} of the held-out data"
        given = split_batch(batch)[2]
        if given is None:
            raise DataError(
                f"{where.capitalize()} has no labels, which the coverage is about. Give batches as "
                "(inputs, labels) or as mappings with 'labels'."
            )
        answer = answer_of(ensemble, batch)
        size = None if task.ragged else answer.member_outputs.shape[-1]
        labels.append(task.check_labels(given, where, size=size))
        answers.append(answer)
        if getattr(ensemble, "novelty", None) is not None:
            known = known_inputs(ensemble, batch)
            shared += 0 if known is None else int(known.sum())
    if not answers:
        raise DataError("The held-out data is empty: it gave no batch.")
    sets = choose_sets(
        replace(join(answers), sets=None, group=None),
        _joined(labels),
        method=chosen,
        coverage=coverage,
        groups=groups,
        randomised=randomised,
        seed=seed,
        longest=getattr(task, "most", 0),
    )
    count = sum(map(len, answers))
    if sets.reads_novelty and shared > SHARED * count:
        warnings.warn(
            f"{shared} of the {count} held-out examples are data that the ensemble learnt as "
            "known: their novelty is low, so that the intervals of other inputs are wider than "
            "needed. Hold other examples out for the sets.",
            stacklevel=2,
        )
    if hasattr(ensemble, "sets"):
        ensemble.sets = sets
    return sets


def _joined(labels: list[Tensor]) -> Tensor:
    """Join labels; those of tokens are padded to the longest text."""
    longest = max(part.shape[-1] for part in labels)
    if labels[0].ndim == 2:
        labels = [
            torch.nn.functional.pad(part, (0, longest - part.shape[-1]), value=IGNORED)
            for part in labels
        ]
    return torch.cat(labels)
