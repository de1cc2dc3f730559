"""From logits to columns (one value per example), and from columns to figures.

Everything reported is a function of a few columns, so data streams through in one pass, memory
grows only with the examples, and resampling (bootstrap.py) needs no model, no sort and no loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data.model_runs import ModelRun
from ..prediction import ANSWER, NEW, UNSURE
from ..tasks import Task
from ..uncertainty import (
    disagreement,
    mean_probability,
    mutual_information,
    pairwise_kl,
    score_logits,
)
from ..uncertainty.scores import OF_ANSWER
from .metrics import (
    BINS,
    AdaptiveError,
    Order,
    Selection,
    Separation,
    Weighed,
    bin_of,
    brier,
    negative_log_likelihood,
    once,
)
from .task_columns import entity_columns, task_columns
from .task_metrics import EntityFigures, LabelFigures, NumberFigures, SetFigures

Columns = dict[str, Tensor]
"""One set's columns by name, each `[example]`."""

Examples = dict[str, Columns]
"""Columns of the sets `id`, `ood/<name>`, `shift/<name>`; `post/...` after temperature scaling."""

OOD = "ood/"
SHIFT = "shift/"
POST = "post/"
NOVELTY = "novelty"
ENTITY = ("B-", "I-", "S-", "E-")
"""How names of classes start that are tags of entities."""
LEAST = 20
"""Fewest examples of a bin of novelty whose coverage is reported."""
ALARM = 0.05
"""Share of known data that raises an alarm: novelty above 0.95."""


HIGHER_IS_BETTER = {
    *("Acc", "AUROC", "AUPR", "Cov_5Risk", "Caught_5"),
    *("LabelAcc", "mAP", "F1_micro", "F1_macro", "Pearson", "Spearman", "ErrorRank"),
    *("F1", "Precision", "Recall", "EM"),
}
LOWER_IS_BETTER = {
    *("RMSE", "MAE", "CRPS", "CRPS_members", "IntervalScore", "Loss"),
    *("NLL", "Brier", "ECE", "aECE", "FPR95", "FPR95_ID_positive", "AURC", "E-AURC", "AUGRC"),
    *("WrongOfAll", "WrongOfAnswered"),
}


class Measured(Protocol):
    """What tables and comparisons read from `Results`, which prints itself as a table."""

    @property
    def name(self) -> str: ...
    @property
    def scores(self) -> list[str]: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> dict[str, str]: ...
    @property
    def examples(self) -> Examples: ...
    @property
    def draws(self) -> dict[Any, dict[str, Tensor]]: ...
    def interval(self, key: str) -> tuple[float, float] | None: ...
    def get(self, key: str) -> float | None: ...
    def __getitem__(self, key: str) -> float: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...


def direction(key: str) -> int:
    """Return 1 when a higher figure is better, -1 when a lower one is, 0 when neither is."""
    last = key.rsplit("/", 1)[-1]
    return (last in HIGHER_IS_BETTER) - (last in LOWER_IS_BETTER)


def columns_of(
    run: ModelRun,
    *,
    scores: Sequence[str],
    logit_scale: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    task: Task | None = None,
    names: Sequence[str] = (),
) -> Columns:
    """Reduce a batch's results to the columns that figures are made of.

    In float64: a confident model's scores differ by less than float32 can tell. `names` are those
    of the classes; tags such as `B-LOC` are also read as entities.
    """
    columns: Columns = {}
    if run.novelty_score is not None:
        columns[f"score:{NOVELTY}"] = run.novelty_score.double()
    if run.novelty is not None:
        columns["alarm"] = run.novelty > 1 - ALARM
    if run.code is not None:
        columns["decision"] = run.code
    if run.covered is not None and run.set_size is not None:
        columns |= {"covered": run.covered, "set_size": run.set_size}
        columns |= {} if run.novelty is None else {"novelty": run.novelty}
    listed = [name for name in scores if name != NOVELTY]
    if task is not None and not task.classifies:
        return columns | task_columns(run, task, listed)
    columns |= _class_columns(run, listed, logit_scale, temperature)
    tagged = any(name.startswith(ENTITY) for name in names)
    if tagged and run.text is not None and run.labels is not None:
        predicted = mean_probability(run.answering_logits).argmax(-1)
        unsure = columns[f"score:{listed[0]}"] if listed else columns["nll"]
        columns |= entity_columns(predicted, run.labels, run.text, unsure, names)
    return columns


def _class_columns(
    run: ModelRun, scores: Sequence[str], logit_scale: Tensor | None, temperature: Tensor | float
) -> Columns:
    """Return the columns of a classifier."""
    logits, labels = run.logits.double(), run.labels
    answer = run.answering_logits.double()
    columns = {
        f"score:{name}": score_logits(
            answer if name in OF_ANSWER else logits,
            name,
            logit_scale=logit_scale,
            temperature=temperature,
        )
        for name in scores
    }
    columns["mutual_information"] = mutual_information(logits)
    if labels is None:
        return columns
    confidence, predicted = mean_probability(answer).max(-1)
    return columns | {
        "label": labels,
        "correct": predicted == labels,
        # torchmetrics bins confidences in float32: so do we, to agree on the bins
        "confidence": confidence.float(),
        "nll": negative_log_likelihood(answer, labels),
        "brier": brier(answer, labels),
        "disagreement": disagreement(logits).double(),
        "pairwise_kl": pairwise_kl(logits),
    }


class AllFigures:
    """Every figure of some examples under torch-uncertainty's names, for any counts of them.

    See `Results` for the names. The first score is the main one: it ranks the errors and has the
    short OOD names.

    Args:
        examples: Columns of all sets.
        scores: Names of the scores.
    """

    def __init__(self, examples: Examples, *, scores: Sequence[str]) -> None:
        kinds = {"": [name for name in examples if not name.startswith(POST)]}
        kinds[POST] = [name for name in examples if name.startswith(POST)]
        self.sizes = {name: len(examples[name][f"score:{scores[0]}"]) for name in kinds[""]}
        self.parts = {
            prefix: _Part({n.removeprefix(prefix): examples[n] for n in names}, scores)
            for prefix, names in kinds.items()
            if names
        }

    def of(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return every figure, `[draw]`, of counts `[draw, example]` by set; NaN if undefined.

        Columns after temperature scaling are the same examples: they share the counts.
        """
        found: dict[str, Tensor] = {}
        for prefix, part in self.parts.items():
            found |= {prefix + key: value for key, value in part.figures(counts).items()}
        return found

    def plain(self) -> dict[str, float]:
        """Return the figures of the data itself."""
        found = self.of({name: once(size) for name, size in self.sizes.items()})
        return {key: float(value) for key, value in found.items()}


class _Part:
    """Sets before or after temperature scaling, in the order of every score."""

    def __init__(self, examples: Examples, scores: Sequence[str]) -> None:
        self.scores = scores

        def ranked(name: str) -> Sequence[str]:
            return scores[:1] if name.startswith(SHIFT) else scores  # shifts by the main one

        self.orders = {
            name: {score: Order(columns[f"score:{score}"]) for score in ranked(name)}
            for name, columns in examples.items()
        }
        self.labelled = {
            name: (_Labelled if "confidence" in columns else _OtherTask)(
                columns, self.orders[name][scores[0]]
            )
            for name, columns in examples.items()
            if not name.startswith(OOD)
        }
        known = self.orders["id"]
        self.apart = {
            name: {score: Separation(known[score], order) for score, order in orders.items()}
            for name, orders in self.orders.items()
            if name.startswith(OOD)
        }
        shares = {n: _alarms(examples[n], "Caught_5") | _decisions(examples[n]) for n in self.apart}
        self.means = {name: _Means(columns) for name, columns in shares.items() if columns}

    def figures(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        main = self.scores[0]
        known = {score: order.weigh(counts["id"]) for score, order in self.orders["id"].items()}
        found = self.labelled["id"].figures(counts["id"], known[main])
        by_kind: dict[str, list[dict[str, Tensor]]] = {OOD: [], SHIFT: []}
        for name, orders in self.orders.items():
            part: dict[str, Tensor] = {}
            if name.startswith(OOD):
                for score, order in orders.items():
                    apart = self.apart[name][score]
                    values = apart.figures(known[score], order.weigh(counts[name]))
                    prefix = "" if score == main else f"{score}/"
                    part |= {prefix + key: value for key, value in values.items()}
                if name in self.means:
                    part |= self.means[name].figures(counts[name])
                by_kind[OOD].append(part)
                if "/" in name.removeprefix(OOD):  # a set of a group, as near/textures
                    by_kind.setdefault(name[: name.rindex("/") + 1], []).append(part)
            elif name.startswith(SHIFT):
                weighed = orders[main].weigh(counts[name])
                part = self.labelled[name].figures(counts[name], weighed)
                by_kind[SHIFT].append(part)
            found |= {f"{name}/{key}": value for key, value in part.items()}
        for kind, parts in by_kind.items():
            if parts:
                shared = [key for key in parts[0] if all(key in part for part in parts)]
                found |= {
                    f"{kind}mean/{key}": torch.stack([part[key] for part in parts]).mean(0)
                    for key in shared
                }
        return found


class _Labelled:
    """The figures of one labelled set of a classifier."""

    def __init__(self, columns: Columns, order: Order) -> None:
        correct, confidence = columns["correct"], columns["confidence"]
        errors = ~correct
        self.means = _Means(
            {
                "cls/Acc": correct,
                "cls/NLL": columns["nll"],
                "cls/Brier": columns["brier"],
                **_alarms(columns, "Alarms_5"),
                **_decisions(columns),
                "div/MI": columns["mutual_information"],
                "div/Disagreement": columns["disagreement"],
                "div/PairwiseKL": columns["pairwise_kl"],
            }
        )
        gap = correct.double() - confidence.double()
        self.bins = torch.nn.functional.one_hot(bin_of(confidence), BINS + 1) * gap[:, None]
        self.adaptive = AdaptiveError(confidence, correct)
        self.ranking = _Ranking(order, errors)
        self.entities: EntityFigures | None = None
        if "entities" in columns:
            unsure = columns["entity_uncertainty"]
            self.entities = EntityFigures(
                columns["entities"], wrong=columns["entity_wrong"], uncertainty=unsure
            )
        self.sets = _sets(columns)

    def figures(self, counts: Tensor, weighed: Weighed) -> dict[str, Tensor]:
        found = {} if self.entities is None else self.entities.figures(counts)
        found |= self.means.figures(counts)
        found["cal/ECE"] = (counts @ self.bins).abs().sum(1) / counts.shape[1]
        found["cal/aECE"] = self.adaptive.figure(counts)
        found |= {} if self.sets is None else self.sets.figures(counts)
        return found | self.ranking.figures(counts, weighed)


class _OtherTask:
    """The figures of one labelled set of a task that has no single class per input."""

    def __init__(self, columns: Columns, order: Order) -> None:
        means = {"div/Between": columns["mutual_information"]}
        self.own: LabelFigures | NumberFigures | None = None
        if "active" in columns:
            self.own = LabelFigures(columns["probabilities"], columns["targets"], columns["active"])
        elif "values" in columns:
            scores = torch.empty(len(order.rows), dtype=order.values.dtype)
            scores[order.rows] = order.values
            self.own = NumberFigures(
                columns["values"],
                columns["targets"],
                sigma=columns.get("sigma"),
                members=columns["member_values"],
                uncertainty=scores,
            )
        else:
            means |= {"cls/Loss": columns["loss"], "cls/Acc": columns["correct"]}
            if "exact" in columns:
                means |= {"qa/EM": columns["exact"], "qa/F1": columns["overlap"]}
        alarms = _alarms(columns, "Alarms_5")
        self.means = _Means({**means, **alarms, **_decisions(columns)})
        self.ranking = _Ranking(order, ~columns["correct"]) if "correct" in columns else None
        self.sets = _sets(columns)

    def figures(self, counts: Tensor, weighed: Weighed) -> dict[str, Tensor]:
        found = {} if self.own is None else self.own.figures(counts)
        found |= self.means.figures(counts)
        found |= {} if self.sets is None else self.sets.figures(counts)
        return found if self.ranking is None else found | self.ranking.figures(counts, weighed)


class _Ranking:
    """How an uncertainty ranks errors; no `fail/` when all examples or none are wrong."""

    def __init__(self, order: Order, errors: Tensor) -> None:
        self.selection = Selection(order, errors) if len(errors) > 1 else None
        self.kinds: tuple[Order, Order] | None = None
        if 0 < int(errors.sum()) < len(errors):
            right, wrong = (~errors).nonzero().flatten(), errors.nonzero().flatten()
            scores = torch.empty(len(errors), dtype=order.values.dtype)
            scores[order.rows] = order.values
            self.kinds = Order(scores[right], right), Order(scores[wrong], wrong)
            self.apart = Separation(*self.kinds)

    def figures(self, counts: Tensor, weighed: Weighed) -> dict[str, Tensor]:
        found = {}
        if self.selection is not None:
            found = {f"sc/{k}": value for k, value in self.selection.figures(weighed).items()}
        if self.kinds is not None:
            failures = self.apart.figures(*(kind.weigh(counts) for kind in self.kinds))
            found |= {f"fail/{key}": failures[key] for key in ("AUROC", "AUPR", "FPR95")}
        return found


class _Means:
    """Means of columns, all in one product.

    A policy's `WrongOfAll` is answered and wrong among all examples, `WrongOfAnswered` among the
    answered.
    """

    def __init__(self, columns: Columns) -> None:
        self.names = list(columns)
        values = torch.stack([column.double() for column in columns.values()], 1)
        # a draw without the example of an infinite loss has a finite one: 0 x inf must not be NaN
        self.values, self.infinite = values.masked_fill(values.isinf(), 0), values.isinf().double()
        self.answers = "policy/WrongOfAll" in columns and bool(columns["policy/Answered"].any())

    def figures(self, counts: Tensor) -> dict[str, Tensor]:
        means = counts @ self.values / counts.shape[1]
        if bool(self.infinite.any()):
            means = means.masked_fill(counts @ self.infinite > 0, torch.inf)
        found = dict(zip(self.names, means.unbind(1), strict=True))
        if self.answers:
            found["policy/WrongOfAnswered"] = found["policy/WrongOfAll"] / found["policy/Answered"]
        return found


def _sets(columns: Columns) -> SetFigures | None:
    """Return the figures of sets, without bins of novelty that draws may miss."""
    if "covered" not in columns:
        return None
    labels, novelty = columns.get("label"), columns.get("novelty")
    found = SetFigures(columns["covered"], columns["set_size"], labels=labels, novelty=novelty)
    found.groups = {
        name: group
        for name, group in found.groups.items()
        if name in ("set/WorstClass", "set/WorstSize") or int(group[0].sum()) >= LEAST
    }
    return found


def _alarms(columns: Columns, name: str) -> Columns:
    return {f"{NOVELTY}/{name}": columns["alarm"]} if "alarm" in columns else {}


def _decisions(columns: Columns) -> Columns:
    """Return how often a policy takes each decision, and how often its answers are wrong."""
    if "decision" not in columns:
        return {}
    decision = columns["decision"]
    found = {
        "policy/Answered": decision == ANSWER,
        "policy/Unsure": decision == UNSURE,
        "policy/New": decision >= NEW,
    }
    if "correct" in columns:
        found["policy/WrongOfAll"] = (decision == ANSWER) & ~columns["correct"]
    return found
