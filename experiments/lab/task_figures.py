"""Figures of the table of every task, from stored answers (`task_rows`).

What is fitted after a model answers (a threshold, Platt scaling, a variance, a temperature) is
fitted on the half of the calibration rows that novelty and `build` did not see, and never on the
test file. Figures are functions of counts `[resample, text]`, alike for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.evaluation.metrics import (
    Order,
    Separation,
    negative_log_likelihood,
    once,
    ood_figures,
)
from hydra_ensembles.evaluation.task_metrics import (
    EntityFigures,
    LabelFigures,
    NumberFigures,
    entities_of,
)
from hydra_ensembles.tasks import MultiLabel, Regression, Task, Tokens
from hydra_ensembles.uncertainty import fit_temperature
from hydra_ensembles.uncertainty.calibrator_fit import fit_scale_shift, fit_variance

from .answers import Tensors
from .other_tasks import TAGS

TASKS: dict[str, Task] = {"goemotions": MultiLabel(), "stsb": Regression(), "wnut17": Tokens()}
ALARM = 0.95
"""Novelty above it is an alarm: 5 % of known data."""
Figures = dict[str, Tensor]


@dataclass(frozen=True)
class Said:
    """What a row said about one set on one draw.

    Attributes:
        task: The task.
        tensors: As `ask` keeps them.
        student: Whether the student answers for the members.
    """

    task: Task
    tensors: Tensors
    student: bool = False

    @property
    def members(self) -> Tensor:
        """The members' outputs, `[example, member, ...]`."""
        return self.tensors["logits"].float()

    @cached_property
    def answering(self) -> Tensor:
        """What the answer is made of, `[example, member, ...]`."""
        if not self.student:
            return self.members
        return self.tensors["student_logits"].float().reshape(len(self.members), 1, -1)

    @property
    def labels(self) -> Tensor:
        """The labels."""
        return self.tensors["labels"]

    @property
    def text(self) -> Tensor:
        """The number of each example's text."""
        return self.tensors.get("text", torch.arange(len(self.members)))

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return int(self.text.max()) + 1

    def rows(self, texts: Tensor) -> Said:
        """Return some of the texts, numbered anew."""
        number = torch.full((self.texts,), -1)
        number[texts] = torch.arange(len(texts))
        kept = (number[self.text] >= 0).nonzero().flatten()
        kept = kept[number[self.text[kept]].argsort(stable=True)]
        by_text = {"novelty", "novelty_score"}
        found = {k: v[texts if k in by_text else kept] for k, v in self.tensors.items()}
        if "text" in found:
            found["text"] = number[found["text"]]
        return Said(self.task, found, self.student)

    def uncertainty(self) -> Tensor | None:
        """Return the task's usual uncertainty of each text; None where it is always 0.

        Of tokens it is the mean over the words.
        """
        if isinstance(self.task, Regression):
            return None if self.members.shape[1] < 2 else self.task.score(self.members, "spread")
        each = self.task.score(self.answering.double(), "msp")
        return mean_by_text(each, self.text) if "text" in self.tensors else each


def mean_by_text(values: Tensor, text: Tensor) -> Tensor:
    """Return the mean over the words of each text."""
    count = int(text.max()) + 1
    sums = torch.zeros(count, dtype=values.dtype).index_add_(0, text, values)
    return sums / torch.bincount(text, minlength=count)


def figures_of(name: str, held_out: Said, test: Said, counts: Tensor) -> Figures:
    """Return the figures of a row's draw, each `[resample]`.

    Args:
        name: The task.
        held_out: What it said about the calibration rows to fit on.
        test: What it said about the test file.
        counts: How often each text counts, `[resample, text]`.
    """
    return FIGURES[name](held_out, test, counts)


def label_figures(held_out: Said, test: Said, counts: Tensor) -> Figures:
    """Return mAP, F1 at one threshold, NLL and ECE before and after Platt scaling, error AUROC."""
    task = MultiLabel()
    threshold = best_threshold(task.mean(held_out.answering.double()).sigmoid(), held_out.labels)
    chances = task.mean(test.answering.double()).sigmoid()
    raw = LabelFigures(chances, test.labels, chances >= threshold).figures(counts)
    platt = fit_scale_shift(held_out.answering, held_out.labels)
    scaled = task.mean(platt(test.answering.double())).sigmoid()
    after = LabelFigures(scaled, test.labels, scaled >= threshold).figures(counts)
    wrong = ((chances >= threshold) != test.labels.bool()).any(1)
    return {
        "mAP": raw["cls/mAP"],
        "F1 micro": raw["cls/F1_micro"],
        "F1 macro": raw["cls/F1_macro"],
        "NLL": raw["cls/NLL"],
        "NLL, Platt": after["cls/NLL"],
        "ECE": raw["cal/ECE"],
        "ECE, Platt": after["cal/ECE"],
        "error AUROC": separation(test.uncertainty(), wrong, counts),
    }


def best_threshold(chances: Tensor, labels: Tensor) -> float:
    """Return the threshold with the best micro F1."""
    true = labels.bool()
    grid = [place / 50 for place in range(2, 41)]

    def f1(threshold: float) -> float:
        said = chances >= threshold
        return 2 * float((said & true).sum()) / float((said.sum() + true.sum()).clamp_min(1))

    return max(grid, key=f1)


def number_figures(held_out: Said, test: Said, counts: Tensor) -> Figures:
    """Return correlation, errors, likelihood and CRPS with a fitted variance, error ranks."""
    values = test.answering.double().mean(1)
    fitted = fit_variance(
        held_out.members, held_out.labels, values=held_out.answering.double().mean(1)
    )
    found = NumberFigures(
        values,
        test.labels.double(),
        sigma=fitted(test.members.double()),
        uncertainty=test.uncertainty(),
    ).figures(counts)
    names = {"Pearson": "reg/Pearson", "RMSE": "reg/RMSE", "NLL": "reg/NLL", "CRPS": "reg/CRPS"}
    result = {name: found[key] for name, key in names.items()}
    if "reg/ErrorRank" in found:
        result["error rank"] = found["reg/ErrorRank"]
    if "novelty_score" in test.tensors:
        new = NumberFigures(
            values, test.labels.double(), uncertainty=test.tensors["novelty_score"]
        ).figures(counts)
        result["error rank, novelty"] = new["reg/ErrorRank"]
    return result


def token_figures(held_out: Said, test: Said, counts: Tensor) -> Figures:
    """Return F1 of entities, NLL of words, AUROC of wrong words and of wrong entities."""
    task = Tokens()
    degrees = fit_temperature(held_out.answering, held_out.labels)
    logits = test.answering.double()
    by_word = counts[:, test.text]

    def nll(of: Tensor) -> Tensor:
        losses = negative_log_likelihood(of, test.labels).double()
        return (by_word @ losses) / by_word.sum(1)

    said = task.mean(logits).argmax(-1)
    unsure = task.score(logits, "msp")
    right_said_true, entities, entity_text = entity_counts(said, test.labels, test.text, unsure)
    found = EntityFigures(right_said_true).figures(counts)
    wrong, doubt = (torch.tensor(column) for column in zip(*entities, strict=True))
    return {
        "entity F1": found["ent/F1"],
        "NLL": nll(logits),
        "NLL, temperature": nll(logits / degrees),
        "token error AUROC": separation(unsure, said != test.labels, by_word),
        "entity error AUROC": separation(doubt.double(), wrong.bool(), counts[:, entity_text]),
    }


def entity_counts(
    said: Tensor, true: Tensor, text: Tensor, unsure: Tensor
) -> tuple[Tensor, list[tuple[bool, float]], Tensor]:
    """Return right, predicted and true entities of each text; and of each predicted entity whether
    it is wrong and its highest uncertainty, and its text."""
    sizes = torch.bincount(text).tolist()
    rows, entities, of = [], [], []
    for place, (ours, theirs, doubt) in enumerate(
        zip(*(column.split(sizes) for column in (said, true, unsure)), strict=True)
    ):
        found, meant = (
            entities_of([TAGS[tag] for tag in tags.tolist()]) for tags in (ours, theirs)
        )
        rows.append([len(found & meant), len(found), len(meant)])
        for kind, first, last in sorted(found):
            wrong = (kind, first, last) not in meant
            entities.append((wrong, float(doubt[first : last + 1].max())))
            of.append(place)
    return torch.tensor(rows), entities, torch.tensor(of)


def separation(scores: Tensor | None, positive: Tensor, counts: Tensor) -> Tensor:
    """Return the AUROC of scores, higher where `positive`, `[resample]`."""
    assert scores is not None
    negative = (~positive).nonzero().flatten()
    hit = positive.nonzero().flatten()
    orders = Order(scores[negative].double(), negative), Order(scores[hit].double(), hit)
    return Separation(*orders).figures(*(order.weigh(counts) for order in orders))["AUROC"]


FIGURES = {"goemotions": label_figures, "stsb": number_figures, "wnut17": token_figures}


def outlier_figures(test: Said, far: Mapping[str, Said]) -> dict[str, Any]:
    """Return the AUROC of each family by uncertainty and by novelty, and the share of alarms."""
    found: dict[str, Any] = {}
    inside = test.uncertainty()
    for name, said in far.items():
        outside = said.uncertainty()
        if inside is not None and outside is not None:
            found[f"{name}, uncertainty"] = ood_figures(inside, outside)["AUROC"]
        if "novelty_score" in test.tensors:
            scores = test.tensors["novelty_score"], said.tensors["novelty_score"]
            found[f"{name}, novelty"] = ood_figures(*scores)["AUROC"]
            found[f"{name}, caught"] = float((said.tensors["novelty"] > ALARM).double().mean())
    if "novelty" in test.tensors:
        found["alarms"] = float((test.tensors["novelty"] > ALARM).double().mean())
    return found


def resamples(texts: int, count: int = 200) -> Tensor:
    """Return how often each text counts: all once, then as drawn with replacement."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(texts, (count, texts), generator=generator)
    drawn = torch.zeros(count, texts).scatter_add_(1, picked, torch.ones(1).expand_as(picked))
    return torch.cat([once(texts), drawn.double()])
