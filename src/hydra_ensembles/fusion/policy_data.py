"""Fit when a model answers and when it abstains, on labelled data (`uncertainty.policies`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..data.class_names import check_class_order
from ..data.eval_mode import evaluating
from ..data.model_runs import member_logits
from ..data.progress import progress_bar
from ..errors import DataError, HydraError
from ..hosts.host_data import data_for
from ..prediction import Prediction
from ..tasks import IGNORED, Task, task_of
from ..uncertainty import Policy, choose_policy
from ..uncertainty.policy_fit import check_rates, check_reachable
from .inputs import READ_BY_ANSWERS
from .known_data import known_inputs

SHARED = 0.05
"""Share of the labelled examples that may be known ones: some data repeats itself."""


def fit_policy(
    ensemble: Any,
    labelled: Iterable[Any],
    *,
    risk: float | None = 0.02,
    alarm: float | None = 0.05,
    method: str = "conformal",
    delta: float = 0.1,
    progress: bool = True,
) -> Policy:
    """Fit when to answer, and when to abstain as unsure or as new; set `ensemble.policy`.

    `predict` then returns a decision per example, and the policy is saved with the ensemble. The
    page on policies says what is guaranteed and what is not. A risk that the labelled examples do
    not allow raises a DataError with the smallest risk that they do; the ensemble keeps the policy
    that it had.

    Args:
        ensemble: A `HydraEnsemble`, or any model that `evaluate` takes (without novelty, so with
            `alarm=None`; the policy is returned and not kept).
        labelled: A few hundred labelled examples from the distribution to be predicted, not used to
            train the model, choose its heads or fit novelty.
        risk: Share of answers that may be wrong; `method` decides what is guaranteed. None answers
            everything that is not new, and needs no labels. What is wrong is said by the task: a
            class, any of several labels, a span, a token (of tokens drawn at random), or a number
            further off than `Regression(tolerance=...)`.
        alarm: Share of in-distribution data that may be called new. None ignores novelty.
        method: `"conformal"`: P(answered and wrong) <= risk, in expectation, from 1 / risk examples
            on. `"selective"`: the error rate among the answered <= risk, with probability 1 -
            delta; needs more examples. `"empirical"`: the same on the labelled data only, without a
            guarantee.
        delta: Probability with which the guarantee of `selective` may fail.
        progress: Show a bar on a terminal.

    Example:
        >>> policy = fit_policy(ensemble, held_out, risk=0.02, alarm=0.05)
        >>> ensemble.predict(batch).decision
        ['answer', 'answer', 'new', 'unsure']
    """
    check_rates(method, risk=risk, alarm=alarm, delta=delta)
    labelled = data_for(ensemble, labelled, name="labelled", once=True)
    check_class_order(ensemble, labelled)
    novelty = getattr(ensemble, "novelty", None)
    if alarm is not None and novelty is None:
        raise HydraError(
            f"alarm={alarm} needs a model that knows its data: call ensemble.fit_novelty_(known) "
            "first, or pass alarm=None."
        )
    before = getattr(ensemble, "policy", None)
    if before is not None:
        ensemble.policy = None  # the old policy may be about another score
    try:
        policy = _fit(ensemble, labelled, risk, alarm, method, delta, progress)
    except BaseException:
        if before is not None:
            ensemble.policy = before
        raise
    if hasattr(ensemble, "policy"):
        ensemble.policy = policy
    return policy


def _fit(
    ensemble: Any,
    labelled: Iterable[Any],
    risk: float | None,
    alarm: float | None,
    method: str,
    delta: float,
    progress: bool,
) -> Policy:
    task = task_of(ensemble)
    answers: list[Prediction] = []
    uncertainties: list[Tensor] = []
    errors: list[Tensor] = []
    shared = 0
    bar = progress_bar(labelled, description="policy", enabled=progress)
    for number, batch in enumerate(bar):
        labels = split_batch(batch)[2]
        if labels is None and risk is not None:
            raise DataError(
                f"Batch {number} has no labels, which the risk is about. Without labels, pass "
                "risk=None."
            )
        answer = answer_of(ensemble, batch)
        counted = torch.ones_like(answer.uncertainty, dtype=torch.bool)
        if task.by_token:
            counted = answer.real if labels is None else answer.real & (labels.cpu() != IGNORED)
        answers.append(answer)
        uncertainties.append(answer.uncertainty[counted])
        if labels is not None and risk is not None:
            checked = task.check_labels(labels, f"batch {number} of the labelled data")
            wrong = task.errors(answer, checked)
            if wrong is None:
                raise DataError(
                    f"No answer of {task.title} is right or wrong, so that it has no risk. Set "
                    "ensemble.task = Regression(tolerance=...) for numbers, or pass risk=None."
                )
            errors.append(wrong[counted])
        if alarm is not None and (known := known_inputs(ensemble, batch)) is not None:
            shared += int(known.sum())
    if not answers:
        raise DataError("The labelled data is empty: it gave no batch.")
    count = sum(map(len, answers))
    if shared > SHARED * count:
        warnings.warn(
            f"{shared} of the {count} labelled examples of the policy are data that the ensemble "
            "learnt as known: the alarm rate will be higher than guaranteed. Hold other examples "
            "out for the policy.",
            stacklevel=3,
        )
    scores = [answer.novelty_score for answer in answers if answer.novelty_score is not None]
    uncertainty = torch.cat(uncertainties)
    wrong = torch.cat(errors) if len(errors) == len(answers) else None
    novelty_score = torch.cat(scores) if scores else None
    options: dict[str, Any] = {"method": method, "delta": delta, "score": answers[0].score}
    return policy_of(task, uncertainty, wrong, novelty_score, risk=risk, alarm=alarm, **options)


def policy_of(
    task: Task,
    uncertainty: Tensor,
    wrong: Tensor | None,
    novelty_score: Tensor | None,
    *,
    risk: float | None,
    alarm: float | None,
    **options: Any,
) -> Policy:
    """Choose a policy and check that it answers anything; see `choose_policy`.

    Of tokens, novelty is by text, and uncertainty and errors are by token.
    """
    if task.by_token and alarm is not None:
        assert novelty_score is not None
        nothing = torch.zeros_like(novelty_score)
        texts = choose_policy(
            nothing, novelty_score=novelty_score, risk=None, alarm=alarm, **options
        )
        if risk is None:
            return texts
        policy = choose_policy(uncertainty, wrong, risk=risk, alarm=None, **options)
        check_reachable(policy, uncertainty, wrong)
        return replace(policy, alarm=alarm, novelty_threshold=texts.novelty_threshold)
    policy = choose_policy(
        uncertainty, wrong, novelty_score=novelty_score, risk=risk, alarm=alarm, **options
    )
    check_reachable(policy, uncertainty, wrong, novelty_score)
    return policy


def answer_of(model: Any, batch: Any) -> Prediction:
    """Predict a batch with any model; an ensemble uses its own score and temperatures."""
    if hasattr(model, "policy"):
        return model.predict(batch).cpu()
    with evaluating(model):
        task = task_of(model)
        more: dict[str, Any] = {"inputs": split_batch(batch)[1]} if task.reads_inputs else {}
        if isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name not in READ_BY_ANSWERS}
        outputs = member_logits(model, batch).float()
        return task.answer(outputs, score=task.default_score, **more).cpu()
