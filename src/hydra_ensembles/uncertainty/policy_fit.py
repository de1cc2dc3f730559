"""Answer, or abstain as unsure, or abstain as new: thresholds with a guarantee.

Fitted on labelled examples that neither trained the model nor chose its heads nor taught it what is
known. With novelty scores s, uncertainties u and n examples:

- *new*, s > q: q is the k-th smallest of the n novelty scores, k = ceil((1 - alarm)(n + 1)), so
  P(s_new > q) <= alarm for a further example that is exchangeable with them (a conformal rank).
- *unsure*, u > t, for what is not new. Three ways to choose t:

  `conformal`: conformal risk control (Angelopoulos, Bates, Fisch, Lei & Schuster, 2024, theorem 1)
  of the examples that are *answered and wrong*, among all:

      t = sup { t : (1 + #{i : s_i <= q, u_i <= t, wrong_i}) / (n + 1) <= risk }

  =>  P(answered and wrong) <= risk, in expectation, for any n, any model and any distribution.

  `selective`: the error rate *among the answered* is at most risk with probability 1 - delta over
  the labelled examples. A binomial (Clopper-Pearson) test of each threshold, in fixed sequences of
  rising thresholds: one starts where so many are answered that no error passes the test, others
  where 2, 6, 14 or 30 errors do, as far as there are examples; S sequences test at level delta / S
  (Learn then Test with several starts: Angelopoulos, Bates, Candes, Jordan & Lei, 2021).

  `empirical`: the error rate among the answered is at most risk on the labelled examples
  themselves. No guarantee.

Why q and t may come from the same examples: given q, the examples below it are independent draws of
"not new" data (a property of order statistics), so that the tests of t are exact given q; and the
expectation of the share below q is k / (n + 1), which turns risk control among them into risk
control among all. In the same way, given a threshold t = u_(j), the j - 1 examples below it are
draws of "answered" data: the tests count one example less than they answer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DataError
from ..prediction import NEW, UNSURE
from ..registry import check_name
from .policy import METHODS, Policy, Rates

STARTS = (0, 2, 6, 14, 30)
"""Errors that pass the first test of each sequence of `selective`."""
FOLDS = 5
_RISKS = [digits * 10.0**place for place in range(-6, -1) for digits in range(10, 100)]
"""Numbers of two digits, from 0.00001 to 0.99."""


def check_rates(
    method: str, *, risk: float | None, alarm: float | None, delta: float | None
) -> None:
    """Raise for a method or a rate that no data could make possible."""
    check_name("method", method, METHODS)
    for name, value in {"risk": risk, "alarm": alarm, "delta": delta}.items():
        within = isinstance(value, (int, float)) and 0 < value < 1
        if value is not None and not within:
            raise ArgumentError(
                f"{name}={value!r}: expected a number between 0 and 1, such as 0.05."
            )
    if risk is None and alarm is None:
        raise ArgumentError("risk=None and alarm=None leave nothing to decide: give one of them.")


def choose_policy(
    uncertainty: Tensor,
    errors: Tensor | None = None,
    *,
    novelty_score: Tensor | None = None,
    risk: float | None = 0.02,
    alarm: float | None = 0.05,
    method: str = "conformal",
    delta: float = 0.1,
    score: str = "msp",
    seed: int = 0,
) -> Policy:
    """Choose the thresholds that answer as much as the guarantees allow (see above).

    `fit_policy` does this for a model and data.

    Args:
        uncertainty: Of labelled examples `[example]`, higher when less sure.
        errors: True where the prediction is wrong `[example]`; not needed without `risk`.
        novelty_score: Of the same examples, the unbounded one `[example]`; needed for `alarm`.
        risk: In (0, 1): rate of wrong answers; None answers all that is not new.
        alarm: In (0, 1): rate of known data that may be called new; None leaves novelty alone.
        method: `conformal`, `selective` or `empirical`.
        delta: In (0, 1): the probability that the guarantee of `selective` fails.
        score: What the uncertainty is called.
        seed: Of the folds that the rates are measured on.
    """
    check_rates(method, risk=risk, alarm=alarm, delta=delta)
    scores = _checked(uncertainty, errors, novelty_score, risk=risk, alarm=alarm)

    def fit(rows: Tensor) -> tuple[float, float]:
        return _thresholds(
            *(None if part is None else part[rows] for part in scores),  # type: ignore[arg-type]
            risk=risk,
            alarm=alarm,
            method=method,
            delta=delta,
        )

    def policy(rows: Tensor, measured: Rates | None = None) -> Policy:
        threshold, newest = fit(rows)
        return Policy(
            threshold=threshold,
            novelty_threshold=newest,
            risk=risk,
            alarm=alarm,
            method=method,
            delta=delta if risk is not None and method == "selective" else None,
            score=score,
            examples=len(rows),
            measured=measured,
        )

    count = len(uncertainty)
    everything = torch.arange(count)
    decision = torch.empty(count, dtype=torch.long)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    folds = min(FOLDS, count)
    for fold in range(folds):
        rows = order[fold::folds]
        others = everything[~torch.isin(everything, rows)] if folds > 1 else everything
        held = None if scores[2] is None else scores[2][rows]
        decision[rows] = policy(others).decide(scores[0][rows], held)
    return policy(everything, Rates.of(decision, scores[1]))


def check_reachable(
    policy: Policy, uncertainty: Tensor, errors: Tensor | None, novelty_score: Tensor | None = None
) -> None:
    """Raise when a policy's risk cannot be had from the examples that it was chosen on.

    That is so when no threshold keeps the risk, or when abstaining makes the answers worse: out of
    fold they are wrong more often, by over a standard error, than if every example that is not new
    were answered. `selective` tests its answers and needs no such check.

    Args:
        policy: What `choose_policy` returned.
        uncertainty, errors, novelty_score: What it was given.
    """
    problem = _problem(policy, uncertainty, errors, novelty_score)
    if problem is None or policy.risk is None:
        return
    count, least = len(uncertainty), least_examples(policy)
    if count < least:
        needed = f"It needs at least {least} labelled examples, with none of the surest wrong."
    else:
        needed = (
            "There are enough examples for it, but the model is wrong too often where it is "
            "surest: check their labels."
        )
    settings: dict[str, Any] = {"alarm": policy.alarm, "method": policy.method}
    settings["delta"] = policy.delta or 0.1
    data = _checked(uncertainty, errors, novelty_score, risk=policy.risk, alarm=policy.alarm)
    smallest = "They allow no risk below 1."
    for risk in _RISKS:
        if risk > policy.risk and _thresholds(*data, risk=risk, **settings)[0] > -math.inf:
            other = choose_policy(*data[:2], novelty_score=data[2], risk=risk, **settings)
            if _problem(other, *data) is None:
                smallest = f"The smallest risk that they allow is {risk:.2g}."
                break
    raise DataError(
        f"A risk of {policy.risk:.3g} ({policy.method}) cannot be had from these {count} labelled "
        f"examples: {problem}. {needed} {smallest}"
    )


def least_examples(policy: Policy) -> int:
    """Return how many labelled examples a policy's risk needs when none of the surest is wrong."""
    assert policy.risk is not None
    if policy.method == "conformal":
        return math.ceil(1 / policy.risk - 1e-9) - 1
    if policy.method != "selective" or policy.delta is None:
        return 1
    answered = math.ceil(math.log(policy.delta) / math.log1p(-policy.risk) - 1e-9) + 1
    return math.ceil(answered / (1 - (policy.alarm or 0)))


def _problem(
    policy: Policy, uncertainty: Tensor, errors: Tensor | None, novelty_score: Tensor | None
) -> str | None:
    """Say why a policy is not worth having, or None (see `check_reachable`)."""
    if policy.risk is None or errors is None or policy.measured is None:
        return None
    if policy.never_answers:
        return "no threshold keeps it, so that nothing would be answered"
    decision, wrong = policy.decide(uncertainty, novelty_score), errors.bool()
    if policy.method == "selective" or not bool((decision == UNSURE).any()):
        return None
    # folds hold fewer examples, and may be too small to answer anything
    rates = policy.measured if policy.measured.answer else Rates.of(decision, wrong)
    share = 0.0 if rates.wrong_if_answered is None else rates.wrong_if_answered
    always = float(wrong[decision < NEW].double().mean())
    noise = (always * (1 - always) / (rates.answer * len(decision))) ** 0.5
    if share < 1 and share <= always + noise:
        return None
    return (
        f"it would answer {rates.answer:.1%} of them, {share:.0%} of that wrong, while "
        f"{always:.1%} of all answers are"
    )


def _checked(
    uncertainty: Tensor,
    errors: Tensor | None,
    novelty: Tensor | None,
    *,
    risk: float | None,
    alarm: float | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return uncertainty, errors and novelty score, in double, those that are asked for."""
    if risk is not None and errors is None:
        raise DataError("risk= needs to know which of the labelled examples are wrong.")
    if alarm is not None and novelty is None:
        raise DataError("alarm= needs the novelty score of every labelled example.")
    novelty = None if alarm is None else novelty
    shape = uncertainty.shape
    fine = uncertainty.ndim == 1 and len(uncertainty) > 0
    for name, part in {"errors": errors, "novelty scores": novelty}.items():
        if not fine or (part is not None and part.shape != shape):
            raise DataError(
                f"Uncertainties of shape {list(shape)}, {name} of shape "
                f"{None if part is None else list(part.shape)}; expected equally long lists of "
                "labelled examples, one answer each."
            )
    for name, part in {"uncertainties": uncertainty, "novelty scores": novelty}.items():
        if part is not None and bool(part.isnan().any()):
            raise DataError(f"{int(part.isnan().sum())} of the {name} are NaN.")
    return (
        uncertainty.double(),
        None if errors is None else errors.bool(),
        None if novelty is None else novelty.double(),
    )


def _thresholds(
    uncertainty: Tensor,
    errors: Tensor | None,
    novelty: Tensor | None,
    *,
    risk: float | None,
    alarm: float | None,
    method: str,
    delta: float,
) -> tuple[float, float]:
    """Return the thresholds of uncertainty and novelty score."""
    count, newest = len(uncertainty), math.inf
    familiar = torch.ones(count, dtype=torch.bool)
    if alarm is not None and novelty is not None:
        rank = math.ceil((1 - alarm) * (count + 1) - 1e-9)
        if rank <= count:
            newest = float(novelty.sort().values[rank - 1])
        familiar = novelty <= newest
    if risk is None or errors is None:
        return math.inf, newest
    if not bool(familiar.any()):
        return -math.inf, newest
    # tied examples are answered together: only whole values can be thresholds
    values, ranks = uncertainty[familiar].unique(return_inverse=True)
    answered = torch.bincount(ranks, minlength=len(values)).cumsum(0)
    wrong = torch.bincount(ranks, weights=errors[familiar].double(), minlength=len(values))
    wrong = wrong.cumsum(0).round().long()
    if method == "conformal":
        chosen = _last((wrong + 1) / (count + 1) <= risk + 1e-12)  # falls with the threshold
    elif method == "empirical":
        chosen = _last(wrong / answered <= risk)
    else:
        chosen = _tested(wrong, answered, risk, delta)
    return (-math.inf if chosen is None else float(values[chosen])), newest


def _last(allowed: Tensor) -> int | None:
    places = allowed.nonzero().flatten()
    return int(places[-1]) if len(places) else None


def _tested(wrong: Tensor, answered: Tensor, risk: float, delta: float) -> int | None:
    """Return the highest threshold whose error rate is tested to be at most the risk."""
    from scipy.special import bdtr

    sizes = start_sizes(int(answered[-1]) - 1, risk, delta)
    if not sizes:
        return None
    # P(Binomial(answered - 1, risk) <= wrong); the example at the threshold is not a draw
    draws = (answered - 1).numpy()
    p = torch.from_numpy(bdtr(wrong.numpy().clip(max=draws), draws, risk))
    passed = (p <= delta / len(sizes)).tolist()
    best = None
    for size in sizes:
        place = int(torch.searchsorted(answered, size + 1))
        while place < len(passed) and passed[place]:
            best = place if best is None else max(best, place)
            place += 1
    return best


def start_sizes(most: int, risk: float, delta: float) -> list[int]:
    """Return how many examples the first test of each sequence has, at most `most`.

    They depend on no outcome: size k is the least of which STARTS[k] errors pass at the level.
    """
    import numpy
    from scipy.special import bdtr

    counts = numpy.arange(1, most + 1)
    for number in range(len(STARTS), 0, -1):
        found = []
        for errors in STARTS[:number]:
            fits = bdtr(numpy.minimum(errors, counts), counts, risk) <= delta / number
            if not fits.any():
                break
            found.append(int(fits.argmax()) + 1)
        if len(found) == number:
            return found
    return []
