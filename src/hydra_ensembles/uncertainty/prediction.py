"""What an ensemble says about a batch: one record of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .._html import table
from .policy import ANSWER, DECISIONS
from .scores import (
    Score,
    as_member_logits,
    disagreement,
    log_mean_probability,
    mean_probability,
    mutual_information,
    scale_logits,
    score_logits,
)


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """What an ensemble says about a batch, and how sure it is.

    A token classifier answers for every token: `[batch, token]` in the place of `[batch]`, and
    member logits `[batch, member, token, class]`; padding is answered for too, and means nothing.

    Attributes:
        probabilities: mean of the members' softmax, `[batch, class]`.
        label: its most probable class, the lower one on a tie, `[batch]`.
        uncertainty: the score named by `score`, higher when less sure, `[batch]`.
        mutual_information: H(mean p) - mean H(p) in nats, `[batch]`.
        disagreement: share of member pairs with different classes, `[batch]`.
        member_logits: the logits that `probabilities` come from, temperatures applied,
            `[batch, member, class]`.
        score: name of the score behind `uncertainty`.
        novelty: share of known data that is less novel, in [0, 1], `[batch]`: above 0.95 for 5 % of
            data like the known. None before `fit_novelty_`.
        novelty_score: what `novelty` ranks, unbounded, `[batch]`; None before `fit_novelty_`.
        decision: 0 answer, 1 abstain as unsure, 2 abstain as new, int64 `[batch]`; None without a
            policy (`fit_policy`).
    """

    probabilities: Tensor
    label: Tensor
    uncertainty: Tensor
    mutual_information: Tensor
    disagreement: Tensor
    member_logits: Tensor
    score: str = "msp"
    novelty: Tensor | None = None
    novelty_score: Tensor | None = None
    decision: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Log of the probabilities, `[batch, class]`, stable: softmax of it is `probabilities`."""
        return log_mean_probability(self.member_logits)

    @property
    def confidence(self) -> Tensor:
        """Probability of the predicted class, `[batch]`."""
        return self.probabilities.amax(-1)

    @property
    def abstain(self) -> Tensor | None:
        """True where the policy does not answer, `[batch]`; None without a policy."""
        return None if self.decision is None else self.decision != ANSWER

    @property
    def decisions(self) -> list[str] | None:
        """The decisions in words, "answer", "unsure" or "new"; None without a policy."""
        if self.decision is None:
            return None
        return [DECISIONS[number] for number in self.decision.tolist()]

    def __len__(self) -> int:
        return self.label.shape[0]

    def __getitem__(self, index: Any) -> Prediction:
        """Return the chosen examples; a single number keeps the batch axis, with one example."""
        if isinstance(index, int):
            length = len(self)
            if not -length <= index < length:
                raise IndexError(f"Example {index} of a prediction on {length}.")
            index = slice(index % length, index % length + 1)
        return self._map(lambda tensor: tensor[index])

    def __iter__(self) -> Iterator[Prediction]:
        return (self[i] for i in range(len(self)))

    def to(self, device: torch.device | str) -> Prediction:
        """Return the prediction on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def cpu(self) -> Prediction:
        """Return the prediction on the CPU."""
        return self.to("cpu")

    def _map(self, function: Callable[[Tensor], Tensor]) -> Prediction:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: function(v) for name, v in values.items() if isinstance(v, Tensor)}
        return Prediction(**{**values, **tensors})

    def _title(self) -> str:
        examples, members, *_, classes = self.member_logits.shape
        of = "1 member" if members == 1 else f"{members} members"
        on = "1 example" if examples == 1 else f"{examples} examples"
        return f"Prediction of {of} on {on}, {classes} classes"

    def _repr_html_(self) -> str:
        examples, _, *tokens, _ = self.member_logits.shape
        title = self._title()
        if tokens:
            return table(f"{title}, for each of {tokens[0]} tokens", [], [])
        columns = {
            "label": ("{:.0f}", self.label),
            "probability": ("{:.3f}", self.confidence),
            f"uncertainty ({self.score})": ("{:.4g}", self.uncertainty),
            "mutual information": ("{:.4g}", self.mutual_information),
            "disagreement": ("{:.2f}", self.disagreement),
        }
        if self.novelty is not None:
            columns["novelty"] = ("{:.3f}", self.novelty)
        shown = {
            name: [form.format(value) for value in values[:20].tolist()]
            for name, (form, values) in columns.items()
        }
        decisions = self[:20].decisions
        if decisions is not None:
            shown["decision"] = decisions
        rows = [[str(i), *row] for i, row in enumerate(zip(*shown.values(), strict=True))]
        note = f"... and {examples - 20} more" if examples > 20 else ""
        return table(title, ["", *shown], rows, note=note)

    def __repr__(self) -> str:
        examples, _, *tokens, _ = self.member_logits.shape
        head = self._title()
        if tokens:
            return f"{head}, for each of {tokens[0]} tokens"
        rows = [f"  {'label':>6}  {'p':>6}  {self.score:>10}  {'mutual inf.':>11}  {'disagree':>8}"]
        rows[0] += "" if self.novelty is None else f"  {'novelty':>7}"
        decisions = self[:8].decisions
        rows[0] += "" if decisions is None else "  decision"
        for i in range(min(examples, 8)):
            rows.append(
                f"  {int(self.label[i]):>6}  {float(self.confidence[i]):>6.3f}"
                f"  {float(self.uncertainty[i]):>10.4g}  {float(self.mutual_information[i]):>11.4g}"
                f"  {float(self.disagreement[i]):>8.2f}"
            )
            if self.novelty is not None:
                rows[-1] += f"  {float(self.novelty[i]):>7.3f}"
            if decisions is not None:
                rows[-1] += f"  {decisions[i]}"
        if examples > 8:
            rows.append(f"  ... and {examples - 8} more")
        return "\n".join([head, *rows]) if examples else head


def predict_from_logits(
    member_logits: Tensor,
    *,
    score: str | Score = "msp",
    temperature: float | Tensor | None = None,
    member_temperatures: Sequence[float] | Tensor | None = None,
    logit_scale: float | Tensor | None = None,
) -> Prediction:
    """Turn member logits into the ensemble's prediction.

    Args:
        member_logits: `[batch, member, class]`, or `[batch, class]` for one model.
        score: the uncertainty to report, a name in `scores` or a function of member logits.
        temperature: divides every member's logits.
        member_temperatures: one for each member, divides its logits first.
        logit_scale: for `mcm`, what multiplies the cosines in the logits. MCM reads the cosines
            themselves, so temperatures do not touch it.
    """
    raw = as_member_logits(member_logits)
    logits = scale_logits(raw, temperature=temperature, member_temperatures=member_temperatures)
    probabilities = mean_probability(logits)
    return Prediction(
        probabilities=probabilities,
        label=probabilities.argmax(-1),
        uncertainty=score_logits(raw if score == "mcm" else logits, score, logit_scale=logit_scale),
        mutual_information=mutual_information(logits),
        disagreement=disagreement(logits),
        member_logits=logits,
        score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
    )
