"""When an exported ensemble abstains: its policy, with thresholds that a program can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..uncertainty import Policy

LARGEST = float(torch.finfo(torch.float32).max)
"""In the place of infinity, which JSON has not."""


@dataclass(frozen=True)
class Rule:
    """The decisions of an exported ensemble.

    Attributes:
        kind: Where they come from: `policy`, `alarm` or `none`.
        policy: The thresholds, all finite.
        words: What they promise, for people.
    """

    kind: str
    policy: Policy
    words: str

    def __call__(self, uncertainty: Tensor, novelty_score: Tensor | None) -> Tensor:
        """Return the decisions, int64 in the shape of the uncertainty: 0 answer, 1, 2 abstain."""
        if self.kind == "none":
            return torch.zeros_like(uncertainty, dtype=torch.long)
        return self.policy.decide(uncertainty, novelty_score)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the contract; None where there is no threshold."""
        limits = (self.policy.threshold, self.policy.novelty_threshold)
        unsure, new = (None if limit == LARGEST else limit for limit in limits)
        return {
            "kind": self.kind,
            "uncertainty_above": unsure,
            "novelty_score_above": new,
            "risk": self.policy.risk,
            "alarm": self.policy.alarm,
            "words": self.words,
        }


def rule_of(ensemble: Any, alarm: float | None) -> Rule:
    """Return the rule that an ensemble is exported with.

    Its own policy; without one, an alarm for inputs newer than all but `alarm` of the known data;
    without novelty, none: everything is answered.
    """
    if ensemble.policy is not None:
        return Rule("policy", finite(ensemble.policy), str(ensemble.policy))
    if alarm is None or ensemble.novelty is None:
        return Rule("none", finite(Policy()), "everything is answered: there is no policy")
    if not 0 < alarm < 1:
        raise ValueError(f"alarm={alarm}: expected a number between 0 and 1, such as 0.05.")
    newest = ensemble.novelty.single().threshold(alarm)
    policy = Policy(novelty_threshold=newest, alarm=alarm, score=ensemble.score)
    words = f"new when novelty is above {1 - alarm:.4g}, as is {alarm:.3g} of the known data"
    return Rule("alarm", finite(policy), words)


def finite(policy: Policy) -> Policy:
    """Return a policy with thresholds that JSON and a program can hold."""
    limits = (policy.threshold, policy.novelty_threshold)
    unsure, new = (min(max(limit, -LARGEST), LARGEST) for limit in limits)
    return replace(policy, threshold=unsure, novelty_threshold=new)
