"""A policy: answer, abstain as unsure, or abstain as new. `policy_fit.py` chooses thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, FormatError, HydraError
from ..prediction import ANSWER, BOTH, DECISIONS, NEW, UNSURE, Prediction

METHODS = ("conformal", "selective", "empirical")
GIVEN = "given"
"""The method of thresholds that were chosen by hand."""


@dataclass(frozen=True)
class Rates:
    """How often each decision is taken, and how often an answer is wrong.

    Attributes:
        examples: Examples decided on.
        answer, unsure, new: Shares of them.
        answered_and_wrong: Share of all that is answered and wrong; None without labels.
        wrong_if_answered: Error rate among the answered; None without labels or answers.
    """

    examples: int
    answer: float
    unsure: float
    new: float
    answered_and_wrong: float | None = None
    wrong_if_answered: float | None = None

    @classmethod
    def of(cls, decision: Tensor, errors: Tensor | None = None) -> Rates:
        """Count decisions `[example]`, and errors `[example]` where they are known."""
        count = len(decision)
        shares = (torch.bincount(decision, minlength=4).double() / max(count, 1)).tolist()
        wrong = among = None
        if errors is not None:
            answered = decision == ANSWER
            wrong = float((answered & errors.bool()).double().mean()) if count else 0.0
            among = float(errors[answered].double().mean()) if bool(answered.any()) else None
        return cls(count, shares[ANSWER], shares[UNSURE], shares[NEW] + shares[BOTH], wrong, among)


@dataclass(frozen=True)
class Policy:
    """When to answer, when to abstain as unsure and when as new, with guaranteed rates.

    Attributes:
        threshold: Answer when the uncertainty is at most this; -inf never, inf always.
        novelty_threshold: An input with a higher novelty score is new; inf never.
        risk: Guaranteed rate of wrong answers; None turns this check off.
        alarm: Guaranteed false-alarm rate on known data; None turns the novelty check off.
        method: `conformal`, `selective`, `empirical`, or `given` for thresholds set by hand.
        delta: For `selective`: the probability that the guarantee fails.
        score: Name of the uncertainty that `threshold` is about.
        examples: Labelled examples that it was fitted on.
        measured: Rates on these examples, each decided on by thresholds fitted without it.
    """

    threshold: float = math.inf
    novelty_threshold: float = math.inf
    risk: float | None = None
    alarm: float | None = None
    method: str = GIVEN
    delta: float | None = None
    score: str = "msp"
    examples: int = 0
    measured: Rates | None = None

    @property
    def reads_novelty(self) -> bool:
        """Whether decisions need a novelty score."""
        return self.alarm is not None

    @property
    def never_answers(self) -> bool:
        """Whether no threshold could keep the risk, so that everything abstains."""
        return self.threshold == -math.inf

    def decide(self, uncertainty: Tensor, novelty_score: Tensor | None = None) -> Tensor:
        """Return the decisions as codes, int64 `[example]`: 0 answer, 1 unsure, 2 new, 3 both.

        This is the only place that decides. What is both unsure and new is new. NaN abstains.

        Args:
            uncertainty: `[example]`, or `[example, token]`, by the policy's `score`.
            novelty_score: `[example]`, the unbounded one; needed when there is an alarm.
        """
        unsure = (~(uncertainty <= self.threshold)).long()
        if self.alarm is None:
            return unsure
        if novelty_score is None:
            raise DataError(
                f"The policy has an alarm rate of {self.alarm} but there is no novelty: call "
                "ensemble.fit_novelty_(known), or fit the policy with alarm=None."
            )
        # the codes add up: UNSURE is 1 and BOTH is UNSURE + NEW
        new = (~(novelty_score <= self.novelty_threshold)).long()
        if uncertainty.ndim > 1:
            new = new.reshape(-1, *[1] * (uncertainty.ndim - 1))
        return torch.add(unsure, new, alpha=NEW)

    def finite(self) -> Policy:
        """Return the policy with thresholds that JSON and an exported program can hold."""
        largest = float(torch.finfo(torch.float32).max)
        unsure, new = (
            min(max(limit, -largest), largest) for limit in (self.threshold, self.novelty_threshold)
        )
        return replace(self, threshold=unsure, novelty_threshold=new)

    def apply(self, answer: Prediction) -> Prediction:
        """Return an answer with the policy's decisions."""
        if answer.score != self.score:
            raise HydraError(
                f"The policy reads the score {self.score!r}, but the answer reports "
                f"{answer.score!r}. Fit the policy again with fit_policy()."
            )
        return replace(answer, code=self.decide(answer.uncertainty, answer.novelty_score))

    def guarantees(self) -> dict[str, str]:
        """Return the guarantee for each decision, in words."""
        found = dict.fromkeys(DECISIONS, "no guarantee")
        if self.risk is not None and self.method == "conformal":
            found["answer"] = f"answered and wrong: at most {self.risk:.3g} of all, on average"
        elif self.risk is not None and self.method == "selective":
            sure = 1 - (self.delta or 0)
            found["answer"] = f"at most {self.risk:.3g} of the answered wrong, {sure:.3g} sure"
        if self.alarm is not None and self.method != GIVEN:
            found["new"] = f"at most {self.alarm:.3g} of data like these examples, on average"
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold; an infinite threshold is a string."""
        plain = asdict(self)
        for name in ("threshold", "novelty_threshold"):
            plain[name] = plain[name] if math.isfinite(plain[name]) else str(plain[name])
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Read what `to_dict` returned."""
        try:
            values = dict(data)
            for name in ("threshold", "novelty_threshold"):
                values[name] = float(values[name])
            measured = values.get("measured")
            policy = cls(**{**values, "measured": None if measured is None else Rates(**measured)})
            good = _is_good(policy)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"Not a valid policy: {error!r}.") from error
        if not good:
            raise FormatError(f"Not a valid policy: {dict(data)!r:.300}.")
        return policy

    def __str__(self) -> str:
        rules = [f"{self.score} <= {self.threshold:.4g}"] * (self.threshold < math.inf)
        if self.alarm is not None:
            rules.append(f"the novelty score <= {self.novelty_threshold:.4g}")
        rule = f"answer when {' and '.join(rules)}" if rules else "always answer"
        if self.method == GIVEN:
            return f"{rule} (thresholds set by hand)"
        lines = [f"{rule} ({self.method}, {self.examples} examples)"]
        rates = self.measured
        for name, guarantee in self.guarantees().items():
            if name == "new" and self.alarm is None:
                continue
            text = "not measured" if rates is None else f"{getattr(rates, name):.1%}"
            if name == "answer" and rates is not None and rates.wrong_if_answered is not None:
                text += f", {rates.wrong_if_answered:.2%} of it wrong"
            lines.append(f"  {name:<7} {text:<30} {guarantee}")
        if self.never_answers:
            lines.append("  No threshold keeps this risk on so few examples: everything abstains.")
        return "\n".join(lines)


def _is_good(policy: Policy) -> bool:
    """Tell whether the numbers of a policy can be."""
    shares = [policy.risk, policy.alarm, policy.delta]
    thresholds = (policy.threshold, policy.novelty_threshold)
    rates = policy.measured
    if rates is not None:
        measured = (rates.answer, rates.unsure, rates.new)
        if not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in measured):
            return False
        if type(rates.examples) is not int or rates.examples < 0:
            return False
        shares += [rates.answered_and_wrong, rates.wrong_if_answered]
    return (
        all(share is None or (type(share) in (int, float) and 0 <= share <= 1) for share in shares)
        and not any(math.isnan(threshold) for threshold in thresholds)
        and policy.method in (*METHODS, GIVEN)
        and isinstance(policy.score, str)
        and type(policy.examples) is int
        and policy.examples >= 0
    )
