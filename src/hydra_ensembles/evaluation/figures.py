"""From logits to columns (one value per example), and from columns to figures.

Everything reported is a function of a few columns, so data streams through in one pass, memory
grows only with the examples, and resampling (bootstrap.py) needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.answers import Answers
from ..uncertainty import (
    Rates,
    disagreement,
    mean_probability,
    mutual_information,
    pairwise_kl,
    score_logits,
)
from .metrics_classification import (
    adaptive_error_of_ranks,
    brier,
    calibration_bins,
    expected_calibration_error_of_bins,
    negative_log_likelihood,
)
from .metrics_ood import (
    aupr_of_counts,
    auroc_of_counts,
    counts_by_rank,
    figures_of_counts,
    fpr_of_counts,
)
from .metrics_selective import figures_of_ranks

Columns = dict[str, Tensor]
"""One set's columns by name, each `[example]`."""

Examples = dict[str, Columns]
"""Columns of the sets `id`, `ood/<name>`, `shift/<name>`; `post/...` after temperature scaling."""

OOD = "ood/"
SHIFT = "shift/"
POST = "post/"
NOVELTY = "novelty"
ALARM = 0.05
"""Share of known data that raises an alarm: novelty above 0.95."""


def columns_of(
    answers: Answers, *, scores: Sequence[str], logit_scale: Tensor | None = None
) -> Columns:
    """Reduce a batch's answers to the columns that figures are made of.

    In float64: a confident model's scores differ by less than float32 can tell.
    """
    logits, labels = answers.logits.double(), answers.labels
    columns = {
        f"score:{name}": score_logits(logits, name, logit_scale=logit_scale)
        for name in scores
        if name != NOVELTY
    }
    if answers.novelty is not None and answers.novelty_score is not None:
        columns[f"score:{NOVELTY}"] = answers.novelty_score.double()
        columns["alarm"] = answers.novelty > 1 - ALARM
    if answers.decision is not None:
        columns["decision"] = answers.decision
    if labels is None:
        return columns
    confidence, predicted = mean_probability(logits).max(-1)
    return columns | {
        "label": labels,
        "correct": predicted == labels,
        # torchmetrics bins confidences in float32: so do we, to agree on the bins
        "confidence": confidence.float(),
        "nll": negative_log_likelihood(logits, labels),
        "brier": brier(logits, labels),
        "mutual_information": mutual_information(logits),
        "disagreement": disagreement(logits).double(),
        "pairwise_kl": pairwise_kl(logits),
    }


def rank_columns(examples: Examples) -> Examples:
    """Replace scores by dense ranks over all sets and add ranks of confidence; no figure changes.

    Order is all that the figures read of a score, and whole ranks need no sorting again.
    """
    ranked = {name: dict(columns) for name, columns in examples.items()}
    for column in {column for columns in examples.values() for column in columns}:
        target = {"confidence": "rank:confidence"}.get(column, column)
        if target == column and not column.startswith("score:"):
            continue
        sets = [name for name, columns in examples.items() if column in columns]
        values = [examples[name][column] for name in sets]
        ranks = torch.cat(values).unique(return_inverse=True)[1]
        for name, part in zip(sets, ranks.split([len(v) for v in values]), strict=True):
            ranked[name][target] = part
    return ranked


def all_figures(ranked: Examples, *, scores: Sequence[str]) -> dict[str, float]:
    """Return every figure of ranked columns under torch-uncertainty's names; see `Results`.

    The first score is the main one: it ranks the errors and has the short OOD names.
    """
    before = {name: columns for name, columns in ranked.items() if not name.startswith(POST)}
    after = {name.removeprefix(POST): ranked[name] for name in ranked if name not in before}
    figures = _figures(before, scores)
    if after:
        figures |= {POST + key: value for key, value in _figures(after, scores).items()}
    return figures


def _figures(ranked: Examples, scores: Sequence[str]) -> dict[str, float]:
    figures = labelled_figures(ranked["id"], score=scores[0])
    by_kind: dict[str, list[dict[str, float]]] = {OOD: [], SHIFT: []}
    for name, columns in ranked.items():
        part: dict[str, float] = {}
        if name.startswith(OOD):
            for score in scores:
                column = f"score:{score}"
                for key, value in _ood_figures(ranked["id"][column], columns[column]).items():
                    part[key if score == scores[0] else f"{score}/{key}"] = value
            if "alarm" in columns:
                part[f"{NOVELTY}/Caught_5"] = float(columns["alarm"].double().mean())
            part |= policy_figures(columns)
            by_kind[OOD].append(part)
            if "/" in name.removeprefix(OOD):  # a set of a group, as near/textures
                by_kind.setdefault(name[: name.rindex("/") + 1], []).append(part)
        elif name.startswith(SHIFT):
            part = labelled_figures(columns, score=scores[0])
            by_kind[SHIFT].append(part)
        figures |= {f"{name}/{key}": value for key, value in part.items()}
    for kind, parts in by_kind.items():
        if parts:
            shared = [key for key in parts[0] if all(key in part for part in parts)]
            figures |= {
                f"{kind}mean/{key}": sum(part[key] for part in parts) / len(parts) for key in shared
            }
    return figures


def labelled_figures(columns: Columns, *, score: str) -> dict[str, float]:
    """Return the figures of one labelled set; no `fail/` when all examples or none are wrong."""
    correct, confidence = columns["correct"], columns["confidence"]
    ranks = columns[f"score:{score}"]
    errors = ~correct
    figures = {
        "cls/Acc": correct.double().mean(),
        "cls/NLL": columns["nll"].mean(),
        "cls/Brier": columns["brier"].mean(),
        "cal/ECE": expected_calibration_error_of_bins(calibration_bins(confidence, correct)),
        "cal/aECE": adaptive_error_of_ranks(columns["rank:confidence"], confidence, correct),
    }
    if len(correct) > 1:
        figures |= {f"sc/{key}": v for key, v in figures_of_ranks(ranks, errors).items()}
    if 0 < int(errors.sum()) < len(errors):
        positives, negatives = counts_by_rank(ranks, errors)
        figures |= {
            "fail/AUROC": auroc_of_counts(positives, negatives),
            "fail/AUPR": aupr_of_counts(positives, negatives),
            "fail/FPR95": fpr_of_counts(positives, negatives),
        }
    if "alarm" in columns:
        figures[f"{NOVELTY}/Alarms_5"] = columns["alarm"].double().mean()
    figures |= policy_figures(columns)  # type: ignore[arg-type]
    figures["div/MI"] = columns["mutual_information"].mean()
    figures["div/Disagreement"] = columns["disagreement"].mean()
    figures["div/PairwiseKL"] = columns["pairwise_kl"].mean()
    return {key: float(value) for key, value in figures.items()}


def policy_figures(columns: Columns) -> dict[str, float]:
    """Return how often a policy takes each decision, and how often its answers are wrong.

    `WrongOfAll` is answered and wrong among all examples, `WrongOfAnswered` among the answered.
    """
    if "decision" not in columns:
        return {}
    errors = ~columns["correct"] if "correct" in columns else None
    rates = Rates.of(columns["decision"], errors)
    figures = {
        "policy/Answered": rates.answer,
        "policy/Unsure": rates.unsure,
        "policy/New": rates.new,
    }
    if rates.answered_and_wrong is not None:
        figures["policy/WrongOfAll"] = rates.answered_and_wrong
    if rates.wrong_if_answered is not None:
        figures["policy/WrongOfAnswered"] = rates.wrong_if_answered
    return figures


def _ood_figures(id_ranks: Tensor, ood_ranks: Tensor) -> dict[str, float]:
    """Return AUROC, AUPR and both FPR95 of one score's ranks, out-of-distribution positive."""
    ranks = torch.cat([id_ranks, ood_ranks])
    return figures_of_counts(*counts_by_rank(ranks, torch.arange(len(ranks)) >= len(id_ranks)))
