"""What an ensemble is unsure about: pure functions on member logits `[batch, member, class]`.

**Sign convention, everywhere in this library: uncertainty is higher when the model is less sure.**
A score that literature states as a confidence (maximum logit, negative energy, MCM) is turned round
here, so that a higher score speaks for out-of-distribution, whatever the score.

The probability of an ensemble is the mean of its members' softmax (Lakshminarayanan et al., 2017).
Every function takes `[batch, class]` too, read as an ensemble of one member, and the logits of a
token classifier `[batch, member, token, class]`, whose answers are `[batch, token]`. They work in
float32 at least and are safe for logits of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import DataError
from ..prediction import ClassPrediction
from ..registry import Registry

Score = Callable[[Tensor], Tensor]

scores: Registry[Score] = Registry("score")
"""Uncertainty scores by name: functions of member logits `[batch, member, class]` to `[batch]`."""


def as_member_logits(logits: Tensor) -> Tensor:
    """Return logits as `[batch, member, class]` in float32 or better; no member axis means one.

    Those of a token classifier, `[batch, member, token, class]`, keep their token axis.
    """
    if logits.ndim == 2:
        logits = logits[:, None]
    if logits.ndim not in (3, 4) or logits.shape[1] < 1 or logits.shape[-1] < 1:
        raise DataError(
            f"Member logits have shape {list(logits.shape)}; expected [batch, member, class] "
            "or [batch, class] with at least one member and one class."
        )
    # half precision has too few digits to rank confident examples
    wide = logits.dtype in (torch.float32, torch.float64)
    return logits if wide else logits.float()


def scale_logits(
    member_logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    member_temperatures: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Divide logits by one temperature, by one for each member, or by the product of both.

    Guo et al., 2017 (one model); Rahaman & Thiery, 2021 (pools of calibrated members).
    """
    logits = as_member_logits(member_logits)
    if member_temperatures is not None:
        count = len(member_temperatures)
        if count != logits.shape[1]:
            raise ValueError(
                f"member_temperatures has {count} values, but there are {logits.shape[1]} "
                "members. Give one temperature for each member."
            )
        checked = _positive(member_temperatures)
        if not isinstance(checked, Tensor):  # filled on the device: nothing is copied to it
            checked = torch.stack([logits.new_full((), value) for value in checked])
        by_member = checked.to(logits)
        logits = logits / by_member.reshape(-1, *[1] * (logits.ndim - 2))
    if temperature is not None:
        logits = logits / _positive(temperature)
    return logits


def calibrated_logits(
    member_logits: Tensor,
    student_logits: Tensor | None,
    *,
    temperature: float | Tensor | None,
    member_temperatures: Sequence[float] | Tensor | None,
    calibrator: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the members' logits and those that answer; without a student they are the same.

    `temperature` and `calibrator` are of the logits that answer. See `predict_from_logits`.
    """
    shared = temperature if student_logits is None else None
    logits = scale_logits(
        member_logits, temperature=shared, member_temperatures=member_temperatures
    )
    answer = logits
    if student_logits is not None:
        answer = scale_logits(student_logits, temperature=temperature)
    if calibrator is not None:
        answer = calibrator(answer)
    return (answer if student_logits is None else logits), answer


def checked_temperature(value: Any) -> float:
    """Return a temperature as a number, or raise when it is none that can divide logits."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    # beyond these bounds float32 logits overflow or become one
    if isinstance(value, (str, bool)) or not 1e-4 <= number <= 1e4:
        raise ValueError(f"Temperature {value!r} is not a positive number (from 0.0001 to 10000).")
    return number


def _positive(temperature: Any) -> Any:
    """Return temperatures when all are positive numbers; a compiled graph cannot ask."""
    if not torch.compiler.is_compiling():
        values = temperature.flatten().tolist() if isinstance(temperature, Tensor) else temperature
        for value in values if isinstance(values, Sequence) else [values]:
            checked_temperature(value)
    return temperature


def member_probabilities(member_logits: Tensor) -> Tensor:
    """Return each member's softmax, `[batch, member, class]`."""
    return as_member_logits(member_logits).softmax(-1)


def mean_probability(member_logits: Tensor) -> Tensor:
    """Return the ensemble's probability, the mean of the members' softmax, `[batch, class]`."""
    return member_probabilities(member_logits).mean(1)


def log_mean_probability(member_logits: Tensor) -> Tensor:
    """Return log mean_m softmax(z_m), `[batch, class]`, without leaving log space."""
    log_probabilities = as_member_logits(member_logits).log_softmax(-1)
    return log_probabilities.logsumexp(1) - math.log(log_probabilities.shape[1])


def log_mean_sigmoid(member_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log mean_m sigmoid(z_m) and log mean_m sigmoid(-z_m), `[batch, label]` each."""
    count = math.log(member_logits.shape[1])
    positive = logsigmoid(member_logits).logsumexp(1) - count
    return positive, logsigmoid(-member_logits).logsumexp(1) - count


def nll_of(member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the NLL of the members' mean probability, `[batch]`, in nats.

    Args:
        member_logits: `[batch, member, class]`.
        labels: One class of each example, `[batch]`; or 0 and 1 for each of several labels,
            `[batch, label]`, whose NLL is averaged.
    """
    if labels.ndim == 1:
        logs = log_mean_probability(member_logits)
        return -logs.gather(-1, labels[:, None].long())[:, 0]
    positive, negative = log_mean_sigmoid(as_member_logits(member_logits))
    labels = labels.to(positive)
    return -(labels * positive + (1 - labels) * negative).mean(-1)


def entropy_of(probabilities: Tensor) -> Tensor:
    """Return the Shannon entropy in nats over the last axis; 0 log 0 is 0."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms.sum(-1)


@scores.register("msp")
def msp(member_logits: Tensor) -> Tensor:
    """Return 1 - max_c mean_m p_m(c), `[batch]` (Hendrycks & Gimpel, 2017).

    Summed as the probability of all other classes: 1 - p rounds every p beyond 1 - 6e-8 to one tie
    in float32, the sum keeps their order.
    """
    return _msp_of(member_probabilities(member_logits))


@scores.register("entropy")
def entropy(member_logits: Tensor) -> Tensor:
    """Return the entropy of the mean probability in nats, `[batch]`."""
    return entropy_of(mean_probability(member_logits))


@scores.register("gen")
def gen(member_logits: Tensor) -> Tensor:
    """Return the generalized entropy of the mean probability, `[batch]` (Liu et al., CVPR 2023).

    sum over the 100 most probable classes of (p (1 - p))^0.1: it hears small probabilities that
    the entropy does not.
    """
    return gen_of(mean_probability(member_logits))


def gen_of(probability: Tensor) -> Tensor:
    """Return the generalized entropy of a probability `[batch, class]`, `[batch]` (see `gen`)."""
    largest, order = probability.topk(min(100, probability.shape[-1]), dim=-1)
    # 1 - p of the most probable class, summed as in msp: it does not round to zero
    others = probability.scatter(-1, order[..., :1], 0.0).sum(-1, keepdim=True)
    rest = torch.cat([others, 1 - largest[..., 1:]], -1)
    return (largest * rest).clamp_min(0).pow(0.1).sum(-1)


@scores.register("max-logit")
def max_logit(member_logits: Tensor) -> Tensor:
    """Return -max_c mean_m z_m(c), `[batch]` (Hendrycks et al., 2022).

    Of the members' logits: of the log mean probability it would be the MSP again.
    """
    return -as_member_logits(member_logits).mean(1).amax(-1)


@scores.register("energy")
def energy(member_logits: Tensor) -> Tensor:
    """Return mean_m -logsumexp_c z_m(c), `[batch]` (Liu et al., 2020).

    Of the members' logits: of the log mean probability it would be zero everywhere.
    """
    return -as_member_logits(member_logits).logsumexp(-1).mean(1)


@scores.register("mutual-information")
def mutual_information(member_logits: Tensor) -> Tensor:
    """Return H(mean_m p_m) - mean_m H(p_m) in nats, `[batch]`, never below 0 (Depeweg 2018)."""
    return _mutual_information_of(member_probabilities(member_logits))


def mcm(member_logits: Tensor, *, logit_scale: float | Tensor = 1.0) -> Tensor:
    """Return 1 - max_c mean_m softmax(cosine_m)(c) at T = 1, `[batch]` (Ming et al., 2022).

    Args:
        member_logits: logits of a zero-shot classifier, `logit_scale * cosine`.
        logit_scale: what multiplies the cosines in them (CLIP: about 100); 1 for plain cosines.
    """
    return msp(as_member_logits(member_logits) / logit_scale)


scores.register("mcm")(mcm)  # not as a decorator: that would hide `logit_scale` from type checkers


def neglabel(member_logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return 1 - mean_m sum_c e^{z_m(c)}, `[batch]` (NegLabel, Jiang et al., ICLR 2024).

    A zero-shot classifier with negative labels gives such logits: the sum is the share of the class
    names beside the negative labels.

    Args:
        member_logits: Logits of a `ZeroShotClassifier` with `negatives`.
        temperature: What the logits were divided by.
    """
    share = (as_member_logits(member_logits) * temperature).logsumexp(-1).exp().mean(1)
    if not torch.compiler.is_compiling() and bool((share > 1.001).any()):
        raise DataError(
            "The score 'neglabel' reads logits beside negative labels, whose exponentials add up "
            f"to 1 at most; found {float(share.max()):.3g}. Make the host by ZeroShotClassifier("
            "..., negatives=True)."
        )
    return 1 - share


scores.register("neglabel")(neglabel)


def disagreement(member_logits: Tensor) -> Tensor:
    """Return the share of member pairs that predict different classes, `[batch]`; 0 for one."""
    votes = as_member_logits(member_logits).argmax(-1)
    members = votes.shape[1]
    if members == 1:
        return torch.zeros_like(votes[:, 0], dtype=torch.float32)
    # summed over ordered pairs, the diagonal adds nothing
    return (votes[:, :, None] != votes[:, None, :]).sum((1, 2)) / (members * (members - 1))


def pairwise_kl(member_logits: Tensor) -> Tensor:
    """Return the mean over ordered pairs i != j of KL(p_i || p_j) in nats, `[batch]`; 0 for one."""
    logs = as_member_logits(member_logits).log_softmax(-1)
    members = logs.shape[1]
    total = torch.zeros_like(logs[:, 0, ..., 0])
    for i in range(members):  # one row of pairs at a time keeps memory at that of the logits
        here = logs[:, i : i + 1]
        ratio = torch.where(here == logs, 0.0, here - logs)  # -inf and -inf do not differ
        total = total + torch.where(here > -math.inf, here.exp() * ratio, 0.0).sum((1, -1))
    return (total / max(members * (members - 1), 1)).clamp_min(0.0)


def per_text(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return one row of logits per text: a token classifier's mean over the tokens of the mask."""
    if logits.ndim == 3:
        return logits
    weight = torch.ones_like(logits[:, :1, :, :1])
    if mask is not None:
        weight = mask.to(logits)[:, None, :, None]
    return (logits * weight).sum(2) / weight.sum(2).clamp_min(1)


def _msp_of(probabilities: Tensor) -> Tensor:
    mean = probabilities.mean(1)
    return mean.scatter(-1, mean.argmax(-1, keepdim=True), 0.0).sum(-1)


def _mutual_information_of(probabilities: Tensor) -> Tensor:
    total = entropy_of(probabilities.mean(1))
    return (total - entropy_of(probabilities).mean(1)).clamp_min(0.0)


OF_ANSWER = frozenset({"msp", "entropy", "gen", "max-logit", "energy", "mcm", "neglabel"})
"""Scores of the answer: with a student they read its logits, all other scores read the members'."""
OF_COSINES = frozenset({"mcm", "neglabel"})
"""Scores of a zero-shot model's own logits, which temperatures do not touch."""

_OF_PROBABILITIES: dict[str, Score] = {
    "msp": _msp_of,
    "entropy": lambda probabilities: entropy_of(probabilities.mean(1)),
    "gen": lambda probabilities: gen_of(probabilities.mean(1)),
    "mutual-information": _mutual_information_of,
}
"""Scores of the members' probabilities `[batch, member, class]`: one softmax serves them all."""


def score_logits(
    member_logits: Tensor,
    score: str | Score = "msp",
    *,
    logit_scale: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Return a registered (or given) score of member logits, `[batch]`.

    Args:
        member_logits: `[batch, member, class]`.
        score: a name in `scores` or a function of member logits.
        logit_scale: for `mcm` alone, what multiplies the cosines; None reads the logits as cosines.
        temperature: for `neglabel` alone, what the logits were divided by.
    """
    if score == "mcm" and logit_scale is not None:
        return mcm(member_logits, logit_scale=logit_scale)
    if score == "neglabel":
        return neglabel(member_logits, temperature=temperature)
    function = scores[score] if isinstance(score, str) else score
    return function(as_member_logits(member_logits))


def predict_from_logits(
    member_logits: Tensor,
    *,
    score: str | Score = "msp",
    temperature: float | Tensor | None = None,
    member_temperatures: Sequence[float] | Tensor | None = None,
    logit_scale: float | Tensor | None = None,
    class_names: Sequence[str] | None = None,
    student_logits: Tensor | None = None,
    calibrator: Callable[[Tensor], Tensor] | None = None,
) -> ClassPrediction:
    """Turn member logits into the ensemble's prediction.

    Args:
        member_logits: `[batch, member, class]`, or `[batch, class]` for one model.
        score: the uncertainty to report, a name in `scores` or a function of member logits.
        temperature: divides the logits behind the probabilities: the student's, without one every
            member's.
        member_temperatures: one for each member, divides its logits first.
        logit_scale: for `mcm`, what multiplies the cosines in the logits. MCM and NegLabel read the
            cosines themselves, so temperatures do not touch them.
        class_names: names of the classes by number.
        student_logits: of one output that answers for the members, `[batch, class]`.
        calibrator: changes the logits behind the probabilities, after the temperatures.
    """
    raw = as_member_logits(member_logits)
    logits, answer = calibrated_logits(
        raw,
        student_logits,
        temperature=temperature,
        member_temperatures=member_temperatures,
        calibrator=calibrator,
    )
    members, scored = logits.softmax(-1), logits
    answering = members
    if student_logits is not None:
        if score in OF_ANSWER:
            raw, scored = as_member_logits(student_logits), answer
        answering, student_logits = answer.softmax(-1), answer[:, 0]
    probabilities = answering.mean(1)
    if isinstance(score, str) and score in _OF_PROBABILITIES:
        uncertainty = _OF_PROBABILITIES[score](answering if score in OF_ANSWER else members)
    else:
        uncertainty = score_logits(
            raw if score in OF_COSINES else scored, score, logit_scale=logit_scale
        )
    return ClassPrediction(
        probabilities=probabilities,
        class_index=probabilities.argmax(-1),
        uncertainty=uncertainty,
        mutual_information=_mutual_information_of(members),
        disagreement=disagreement(logits),
        member_logits=logits,
        score=score if isinstance(score, str) else getattr(score, "__name__", "score"),
        class_names=class_names,
        student_logits=student_logits,
    )
