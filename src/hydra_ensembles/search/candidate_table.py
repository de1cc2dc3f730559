"""What selection reads from candidates, computed once: scoring an ensemble is then a few sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.padding import joined_rows
from ..uncertainty import find_temperature, score_logits
from .trunk_cache import Outputs


def joined(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join data sets `<part>:<name>` by name, in the order of the parts."""
    by_name: dict[str, list[Tensor]] = {}
    for key, tensor in parts.items():
        by_name.setdefault(key.partition(":")[2], []).append(tensor)
    return {
        name: torch.cat(tensors) if tensors[0].ndim < 3 else joined_rows(tensors)
        for name, tensors in by_name.items()
    }


CLASSES = 64

GRID = tuple(1.15**step for step in range(-4, 4))
"""Temperatures tried for an ensemble, as factors of the host's."""


@dataclass(frozen=True)
class Figures:
    """An ensemble's metrics on validation data.

    Attributes:
        auroc: AUROC by family, then by score.
        nll: NLL of the mean probability; `nll_scaled`: at the ensemble's own best temperature.
        accuracy: On in-distribution data.
    """

    auroc: dict[str, dict[str, float]]
    nll: float
    nll_scaled: float
    accuracy: float


@dataclass(frozen=True)
class Column:
    """One data set: what selection reads of each candidate.

    Attributes:
        top: Probabilities of the classes that any candidate finds probable [example, candidate,
            class]; all classes if there are at most `CLASSES`. The class that an ensemble predicts
            is probable for one of its members, so these determine its confidence.
        energy: -logsumexp of the logits [example, candidate].
        logits: The logits of all examples and candidates, for other scores; never fully copied.
        rows, places: The examples and candidates of `logits` in this column; None for all.
    """

    top: Tensor
    energy: Tensor
    logits: Tensor
    rows: Tensor | None = None
    places: Sequence[int] | None = None

    def take(self, rows: Tensor) -> Column:
        """Return some examples."""
        before = rows if self.rows is None else self.rows[rows]
        return Column(self.top[rows], self.energy[rows], self.logits, before, self.places)

    def only(self, index: Sequence[int]) -> Column:
        """Return some candidates."""
        places = index if self.places is None else [self.places[i] for i in index]
        return Column(self.top[:, index], self.energy[:, index], self.logits, self.rows, places)

    def members(self, index: Sequence[int]) -> Tensor:
        """Return the logits of the given candidates, [example, member, class]."""
        places = index if self.places is None else [self.places[i] for i in index]
        chosen = self.logits[:, places]
        return (chosen if self.rows is None else chosen[self.rows]).float()


class Table:
    """Probabilities, energies and true-class probabilities of all candidates.

    Args:
        outputs: Logits of all candidates on `"id"` and `"ood/..."`.
        temperature: The host's temperature, fitted on candidate 0 (the unpruned host) by default.
            NLL after scaling is the lowest on a grid around it: pruned members are less confident
            than the host, so the host's temperature would put them at a disadvantage.
    """

    def __init__(self, outputs: Outputs, *, temperature: float | None = None) -> None:
        self.labels = outputs.labels["id"]
        known = outputs.logits["id"]
        self.temperature = (
            find_temperature(known[:, :1], self.labels).temperature
            if temperature is None
            else temperature
        )
        self.columns: dict[str, Column] = {}
        predicted = []
        for name, logits in outputs.logits.items():
            top, classes = _probable(logits)
            energy = torch.cat([-part.logsumexp(-1) for part in logits.split(64)])
            self.columns[name] = Column(top, energy, logits)
            if name == "id":
                predicted.append(classes)
        self.classes = predicted[0]
        self.target = _at_labels(known, self.labels)
        self.target_scaled = torch.stack(
            [_at_labels(known, self.labels, self.temperature * factor) for factor in GRID], 1
        )

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return self.target.shape[1]

    @property
    def families(self) -> list[str]:
        """Names of the outlier families."""
        return [name for name in self.columns if name.startswith("ood")]

    def sizes(self) -> dict[str, int]:
        """Number of examples by data set."""
        return {name: len(column.energy) for name, column in self.columns.items()}

    def take(self, rows: Mapping[str, Tensor]) -> Table:
        """Return the given examples of the data sets in `rows`."""
        part = Table.__new__(Table)
        part.temperature = self.temperature
        part.columns = {name: self.columns[name].take(index) for name, index in rows.items()}
        for name in ("labels", "classes", "target", "target_scaled"):
            setattr(part, name, getattr(self, name)[rows["id"]])
        return part

    def only(self, candidates: Sequence[int]) -> Table:
        """Return some candidates."""
        part, index = Table.__new__(Table), list(candidates)
        part.__dict__.update(self.__dict__)
        part.columns = {name: column.only(index) for name, column in self.columns.items()}
        part.target, part.target_scaled = self.target[:, index], self.target_scaled[..., index]
        return part

    def figures(self, members: Sequence[int], *, scores: Sequence[str] = ("msp",)) -> Figures:
        """Score an ensemble of candidates by uncertainty scores; one may be a member repeatedly."""
        index = list(members)
        means = {
            name: column.top[:, index].mean(1)
            for name, column in self.columns.items()
            if "msp" in scores or name == "id"
        }
        auroc: dict[str, dict[str, float]] = {name: {} for name in self.families}
        for score in scores:
            inliers = self._score(score, "id", index, means).sort().values
            for family in auroc:
                other = self._score(score, family, index, means)
                low = torch.searchsorted(inliers, other)
                high = torch.searchsorted(inliers, other, right=True)
                auroc[family][score] = float((low + high).double().mean()) / (2 * len(inliers))
        nll, scaled = (
            -float(t[..., index].mean(-1).clamp_min(1e-30).log().double().mean(0).amax())
            for t in (self.target, self.target_scaled)
        )
        guess = self.classes.gather(-1, means["id"].argmax(-1, keepdim=True))[:, 0]
        return Figures(auroc, nll, scaled, float((guess == self.labels).double().mean()))

    def grown(
        self, have: Sequence[int], pool: Sequence[int], *, scores: Sequence[str] = ("msp",)
    ) -> list[Figures]:
        """Score `have` plus each candidate of a pool, all at once; only for MSP and energy."""
        figures: list[Figures] = []
        for start in range(0, len(pool), 64):
            figures += self._grown(list(have), list(pool[start : start + 64]), scores)
        return figures

    def _grown(self, have: list[int], pool: list[int], scores: Sequence[str]) -> list[Figures]:
        def mean(values: Tensor) -> Tensor:  # [example, candidate, ...] to [example, pool, ...]
            return (values[:, have].sum(1, keepdim=True) + values[:, pool]) / (len(have) + 1)

        own_mean = mean(self.columns["id"].top)
        aurocs: dict[str, dict[str, Tensor]] = {name: {} for name in self.families}
        for score in scores:
            inliers = 1 - own_mean.amax(-1) if score == "msp" else mean(self.columns["id"].energy)
            low = inliers.t().contiguous().sort(-1).values
            for name in aurocs:
                column = self.columns[name]
                other = 1 - mean(column.top).amax(-1) if score == "msp" else mean(column.energy)
                other = other.t().contiguous()
                places = torch.searchsorted(low, other) + torch.searchsorted(low, other, right=True)
                aurocs[name][score] = places.double().mean(1) / (2 * low.shape[1])
        nll = -mean(self.target).clamp_min(1e-30).log().double().mean(0)
        by_member = self.target_scaled  # [example, temperature, candidate]
        grown = by_member[..., have].sum(-1, keepdim=True) + by_member[..., pool]
        logs = (grown / (len(have) + 1)).clamp_min(1e-30).log()
        scaled = -logs.double().mean(0).amax(0)
        guess = self.classes.gather(-1, own_mean.argmax(-1))
        accuracy = (guess == self.labels[:, None]).double().mean(0)
        return [
            Figures(
                {name: {s: float(by[s][k]) for s in scores} for name, by in aurocs.items()},
                float(nll[k]),
                float(scaled[k]),
                float(accuracy[k]),
            )
            for k in range(len(pool))
        ]

    def _score(self, score: str, name: str, index: list[int], means: dict[str, Tensor]) -> Tensor:
        if score == "msp":
            return 1 - means[name].amax(-1)
        if score == "energy":
            return self.columns[name].energy[:, index].mean(1)
        return score_logits(self.columns[name].members(index), score)


def _probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the most probable classes, and the classes [example, class]."""
    top, classes = [], []
    for part in logits.split(64):  # in parts: 64 x candidates x classes in memory
        probabilities = part.float().softmax(-1)
        number = probabilities.shape[-1]
        if number <= CLASSES:
            chosen = torch.arange(number).expand(len(part), -1)
        else:
            chosen = probabilities.amax(1).topk(CLASSES, dim=-1).indices.sort(-1).values
        classes.append(chosen)
        where = chosen[:, None].expand(-1, probabilities.shape[1], -1)
        top.append(probabilities.gather(-1, where))
    return torch.cat(top), torch.cat(classes)


def _at_labels(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return every candidate's probability of the label [example, candidate]."""
    probabilities = []
    for part, label in zip(logits.split(64), labels.split(64), strict=True):
        logs = (part.float() / temperature).log_softmax(-1)
        place = label[:, None, None].expand(-1, logs.shape[1], 1)
        probabilities.append(logs.gather(-1, place)[..., 0].exp())
    return torch.cat(probabilities)
