"""What selection reads of candidates: computed once, so that judging an ensemble is a few sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..uncertainty import disagreement, fit_temperature, score_logits
from .objectives import auroc, ece_of
from .prefix import Outputs


@dataclass(frozen=True)
class Figures:
    """How an ensemble does on validation data.

    Attributes:
        auroc: By family, then by score.
        nll: Of the mean probability; `nll_scaled`: with the host's temperature on every member.
        accuracy, ece, disagreement: On in-distribution data; the last two only where asked for.
    """

    auroc: dict[str, dict[str, float]]
    nll: float
    nll_scaled: float
    accuracy: float
    ece: float = 0.0
    disagreement: float = 0.0


class Table:
    """Candidates' probabilities, energies and true-class probabilities.

    Args:
        outputs: Logits of all candidates on `"id"` and `"ood/..."`.
        temperature: The host's temperature, for NLL after scaling; fitted on candidate 0 (the
            unpruned host) by default.
    """

    def __init__(self, outputs: Outputs, *, temperature: float | None = None) -> None:
        self.outputs = outputs
        self.labels = outputs.labels["id"]
        own = outputs.logits["id"]
        self.temperature = (
            fit_temperature(own[:, :1], self.labels) if temperature is None else temperature
        )
        self.energies = {k: -v.logsumexp(-1) for k, v in outputs.logits.items()}
        self.probabilities = {k: v.softmax(-1) for k, v in outputs.logits.items()}
        place = self.labels[:, None, None].expand(-1, own.shape[1], 1)
        self.target = self.probabilities["id"].gather(-1, place)[..., 0]
        scaled = torch.cat([part.log_softmax(-1) for part in (own / self.temperature).split(64)])
        self.target_scaled = scaled.gather(-1, place)[..., 0].exp()

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return self.target.shape[1]

    @property
    def families(self) -> list[str]:
        """Names of the outlier families."""
        return [name for name in self.outputs.logits if name.startswith("ood")]

    def sizes(self) -> dict[str, int]:
        """Examples by data set."""
        return {name: len(logits) for name, logits in self.outputs.logits.items()}

    def figures(
        self,
        members: Sequence[int],
        *,
        scores: Sequence[str] = ("msp",),
        rows: Mapping[str, Tensor] | None = None,
        detail: bool = False,
    ) -> Figures:
        """Judge an ensemble of candidates; a candidate may be a member more than once.

        Args:
            members: Candidates.
            scores: Uncertainty scores to rank by.
            rows: Examples by data set; all by default.
            detail: Compute ECE and disagreement too.
        """
        index = list(members)
        by_set: dict[str, dict[str, Tensor]] = {}
        mean_id = None
        families = [f for f in self.families if rows is None or f in rows]
        for name in ("id", *families):
            chosen = None if rows is None else rows[name]
            some = self.probabilities[name]
            mean = sum((_rows(some[:, m], chosen) for m in index), start=torch.zeros(())) / len(
                index
            )
            by_set[name] = {s: self._score(s, name, index, chosen, mean) for s in scores}
            mean_id = mean if name == "id" else mean_id
        assert mean_id is not None
        rows_id = None if rows is None else rows["id"]
        labels = _rows(self.labels, rows_id)
        found = {
            family: {s: auroc(by_set["id"][s], by_set[family][s]) for s in scores}
            for family in families
        }
        nll, scaled = (
            -float(_rows(t, rows_id)[:, index].mean(1).clamp_min(1e-30).log().double().mean())
            for t in (self.target, self.target_scaled)
        )
        extra: dict[str, float] = {}
        if detail:
            logits = _rows(self.outputs.logits["id"], rows_id)[:, index]
            extra = {
                "ece": ece_of(logits, labels),
                "disagreement": float(disagreement(logits).mean()),
            }
        accuracy = float((mean_id.argmax(-1) == labels).double().mean())
        return Figures(found, nll, scaled, accuracy, **extra)

    def _score(
        self, score: str, name: str, index: list[int], rows: Tensor | None, mean: Tensor
    ) -> Tensor:
        if score == "msp":
            return 1 - mean.amax(-1)
        if score == "energy":
            return _rows(self.energies[name], rows)[:, index].mean(1)
        return score_logits(_rows(self.outputs.logits[name], rows)[:, index], score)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]
