"""When to answer and when to abstain: a threshold on the uncertainty for a chosen risk.

Fitted on held-out labelled examples that neither trained the model nor chose its heads. An example
is answered when its uncertainty is at most the threshold. Two methods:

- `empirical`: the highest threshold whose *error rate among the answered* is at most the risk on
  the held-out examples (Geifman & El-Yaniv, 2017, without their bound). No guarantee.
- `conformal`: conformal risk control (Angelopoulos, Bates, Fisch, Lei & Schuster, 2024, theorem 1)
  of the rate of examples that are *answered and wrong*, L(t) = 1[u <= t and wrong], which rises
  with t and is bounded by B = 1:

      t = sup { t : n / (n + 1) * mean_i L_i(t) + B / (n + 1) <= risk }   =>   E[L_new(t)] <= risk

  for any n, any model and any distribution, as long as the new example is exchangeable with the
  held-out ones. The expectation is over both; the error rate among the answered is at most
  risk / coverage. It says nothing about out-of-distribution examples.

Neither threshold hears of inputs unlike anything known, on which a model can be wrong and sure. So
a rule may also have an alarm level a: an example whose novelty is above 1 - a is not answered,
whatever its uncertainty. `reasons` says which of the two spoke: "too unsure" or "too new".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, FormatError
from ..registry import check_name

METHODS = ("empirical", "conformal")
REASONS = ("too unsure", "too new")


@dataclass(frozen=True)
class Abstention:
    """A rule: answer when the uncertainty is at most `threshold`.

    Attributes:
        threshold: Of the uncertainty; -inf never answers.
        risk: What was asked for.
        method: `empirical` or `conformal`.
        score: Name of the uncertainty that the threshold is about.
        examples: Held-out examples that it was fitted on.
        coverage: Share of them that is answered.
        selective_risk: Error rate among the answered, on the held-out examples (0 when none is).
        answered_and_wrong: Share of all of them that is answered and wrong.
        alarm: Do not answer when novelty is above 1 - alarm; None leaves novelty alone.
    """

    threshold: float
    risk: float
    method: str
    score: str
    examples: int
    coverage: float
    selective_risk: float
    answered_and_wrong: float
    alarm: float | None = None

    def abstains(self, uncertainty: Tensor, novelty: Tensor | None = None) -> Tensor:
        """Return True where the uncertainty (or NaN) or the novelty is above its threshold."""
        return ~(uncertainty <= self.threshold) | self._is_new(uncertainty, novelty)

    def reasons(self, uncertainty: Tensor, novelty: Tensor | None = None) -> list[str]:
        """Say why each example is not answered: "too unsure", "too new", both, or nothing."""
        unsure, new = ~(uncertainty <= self.threshold), self._is_new(uncertainty, novelty)
        words = zip(unsure.tolist(), new.tolist(), strict=True)
        return [
            " and ".join(w for w, yes in zip(REASONS, pair, strict=True) if yes) for pair in words
        ]

    def _is_new(self, uncertainty: Tensor, novelty: Tensor | None) -> Tensor:
        if self.alarm is None:
            return torch.zeros_like(uncertainty, dtype=torch.bool)
        if novelty is None:
            raise DataError(
                f"The rule has an alarm level of {self.alarm} but there is no novelty: fit it with "
                "ensemble.fit_novelty_(known), or fit the rule without alarm=."
            )
        return ~(novelty <= 1 - self.alarm)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        threshold = self.threshold if math.isfinite(self.threshold) else str(self.threshold)
        return {**asdict(self), "threshold": threshold}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Abstention:
        """Read what `to_dict` returned."""
        try:
            rule = cls(**{**data, "threshold": float(data["threshold"])})
            numbers = (rule.risk, rule.coverage, rule.selective_risk, rule.answered_and_wrong)
            good = (
                all(type(n) in (int, float) and 0 <= n <= 1 for n in numbers)
                and not math.isnan(rule.threshold)
                and rule.method in METHODS
                and isinstance(rule.score, str)
                and type(rule.examples) is int
                and rule.examples > 0
                and (rule.alarm is None or 0 < float(rule.alarm) < 1)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"This is no abstention rule: {error!r}.") from error
        if not good:
            raise FormatError(f"This is no abstention rule: {dict(data)!r:.300}.")
        return rule

    def __str__(self) -> str:
        promise = (
            f"P(answered and wrong) <= {self.risk:.3g} on exchangeable data"
            if self.method == "conformal"
            else f"error rate among the answered <= {self.risk:.3g} on the held-out examples"
        )
        known = "" if self.alarm is None else f" and novelty <= {1 - self.alarm:.4g}"
        return (
            f"answer when {self.score} <= {self.threshold:.4g}{known} ({self.method}: {promise})\n"
            f"  held out: {self.examples} examples, {self.coverage:.1%} answered, "
            f"{self.selective_risk:.2%} of those wrong"
        )


def fit_abstention(
    uncertainty: Tensor,
    errors: Tensor,
    *,
    risk: float = 0.05,
    method: str = "empirical",
    score: str = "msp",
    novelty: Tensor | None = None,
    alarm: float | None = None,
) -> Abstention:
    """Choose the threshold that answers as much as the risk allows.

    Args:
        uncertainty: Of held-out examples `[example]`, higher when less sure.
        errors: True where the prediction is wrong `[example]`.
        risk: In (0, 1): the error rate among the answered (`empirical`), or the rate of answered
            and wrong examples among all (`conformal`).
        method: `empirical`, or `conformal` for the finite-sample guarantee.
        score: What the uncertainty is called.
        novelty: Of the same examples `[example]`, for `alarm`.
        alarm: In (0, 1): also abstain when novelty is above 1 - alarm.
    """
    check_name("method", method, METHODS)
    if not 0 < risk < 1:
        raise ValueError(f"risk={risk}: expected a number between 0 and 1, such as 0.05.")
    if uncertainty.ndim != 1 or uncertainty.shape != errors.shape or not len(errors):
        raise DataError(
            f"Uncertainties of shape {list(uncertainty.shape)} and errors of shape "
            f"{list(errors.shape)}; expected two equally long lists of held-out examples."
        )
    if bool(uncertainty.isnan().any()):
        raise DataError(f"{int(uncertainty.isnan().sum())} of the uncertainties are NaN.")
    count = len(errors)
    if alarm is not None:
        if not 0 < alarm < 1:
            raise ValueError(f"alarm={alarm}: expected a number between 0 and 1, such as 0.05.")
        if novelty is None or novelty.shape != errors.shape:
            raise DataError("alarm= needs the novelty of every held-out example.")
        familiar = novelty <= 1 - alarm  # the others are not answered at any threshold
        uncertainty, errors = uncertainty[familiar], errors[familiar]
    # tied examples are answered together: only whole values can be thresholds
    values, ranks = uncertainty.double().unique(return_inverse=True)
    answered = torch.bincount(ranks, minlength=len(values)).cumsum(0).double()
    wrong = torch.bincount(ranks, weights=errors.double(), minlength=len(values)).cumsum(0)
    if method == "conformal":
        allowed = (wrong + 1) / (count + 1) <= risk  # monotone in the threshold
    else:
        allowed = wrong / answered <= risk
    chosen = allowed.nonzero().flatten()
    if not len(chosen):
        return Abstention(-math.inf, risk, method, score, count, 0.0, 0.0, 0.0, alarm)
    last = int(chosen[-1])
    return Abstention(
        threshold=float(values[last]),
        risk=risk,
        method=method,
        score=score,
        examples=count,
        coverage=float(answered[last]) / count,
        selective_risk=float(wrong[last] / answered[last]),
        answered_and_wrong=float(wrong[last]) / count,
        alarm=alarm,
    )
