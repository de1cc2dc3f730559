"""Whether members keep the host's detection by MSP on outliers that their choice did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluation.intervals import Interval, percentiles
from ..uncertainty import score_logits

TOLERANCE = 0.5
"""Points of mean AUROC that the lower end of the interval may lie below the host."""
DRAWS = 1000

Rows = Mapping[str, Tensor]
Group = tuple[str, Tensor]
"""A left-out family: its data set and its rows there."""
Choose = Callable[[Rows, Rows], Sequence[int]]
"""Choose members on the rows that select and the rows that decide."""


@dataclass(frozen=True)
class Detection:
    """Gain in AUROC by MSP over the host on unseen outliers, in points.

    Attributes:
        gains: By family.
        mean: Over the families, with a paired 95 % bootstrap interval over examples.
    """

    gains: dict[str, float]
    mean: Interval

    @property
    def kept(self) -> bool:
        """Whether detection is as good as the host's (within `TOLERANCE`)."""
        return self.mean.low >= -TOLERANCE

    @property
    def sentence(self) -> str:
        """The gains in words."""
        families = ", ".join(f"{name} {gain:+.1f}" for name, gain in self.gains.items())
        mean, low, high = self.mean
        return f"AUROC by MSP {mean:+.1f} [{low:+.1f}, {high:+.1f}] against the host ({families})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the record."""
        return {"gains": self.gains, "mean": list(self.mean), "kept": self.kept}


def compare_detection(
    cases: Mapping[str, tuple[Tensor, Tensor, Tensor, Tensor]], *, seed: int = 0
) -> Detection:
    """Compare AUROC by family, paired over examples.

    Args:
        cases: By family, logits `[example, member, class]` of known data and of outliers by the
            ensemble, then both by the host. Known examples are the same in all families.
        seed: Seed of the bootstrap.
    """
    generator = torch.Generator().manual_seed(seed)
    gains: dict[str, float] = {}
    draws: list[Tensor] = []
    known_weights: Tensor | None = None
    for name, (known, outliers, host_known, host_outliers) in cases.items():
        moved = 100 * (_wins(known, outliers) - _wins(host_known, host_outliers))
        gains[name] = float(moved.mean())
        if known_weights is None:
            known_weights = _weights(moved.shape[1], generator)
        weights = _weights(moved.shape[0], generator)
        draws.append(((weights @ moved) * known_weights).sum(1))
    mean = sum(gains.values()) / len(gains)
    return Detection(gains, Interval(mean, *percentiles(torch.stack(draws).mean(0))))


def left_out_detection(
    logits: Mapping[str, Tensor],
    members: Sequence[int],
    choose: Choose,
    *,
    select: Rows,
    hold: Rows,
    seed: int = 0,
) -> Detection:
    """Leave each family of outliers out of the choice in turn, and judge the choice on it.

    Data sets `proxy/...` took no part in any choice; `members` are judged on them. A single family
    is split into two halves that differ for the host.

    Args:
        logits: Of all candidates `[example, candidate, class]` by data set; candidate 0 is the
            host.
        members: The choice with all families.
        choose: Repeats the choice on fewer rows.
        select, hold: Rows that selected and that decided.
        seed: Seed of the bootstrap.
    """
    known = logits["id"][hold["id"]]
    cases = {}
    for label, (name, rows) in _families(logits).items():
        rest = [_without(part, name, rows) for part in (select, hold)]
        chosen = list(choose(*rest))
        unseen = logits[name][rows]
        cases[label] = (known[:, chosen], unseen[:, chosen], known[:, :1], unseen[:, :1])
    index = list(members)
    for name in (name for name in logits if name.startswith("proxy/")):
        made = logits[name]
        cases[name] = (known[:, index], made[:, index], known[:, :1], made[:, :1])
    return compare_detection(cases, seed=seed)


def _families(logits: Mapping[str, Tensor]) -> dict[str, Group]:
    """Return the families to leave out by label."""
    names = [name for name in logits if name.startswith("ood/")]
    if len(names) > 1:
        return {
            name.removeprefix("ood/"): (name, torch.arange(len(logits[name]))) for name in names
        }
    # one family: two halves along the direction in which the host's answers differ most
    name = names[0]
    answers = logits[name][:, 0].float().log_softmax(-1)
    _, _, directions = torch.linalg.svd(answers - answers.mean(0), full_matrices=False)
    order = (answers @ directions[0]).argsort(stable=True)
    label, half = name.removeprefix("ood/"), len(order) // 2
    return {f"{label} 1/2": (name, order[:half]), f"{label} 2/2": (name, order[half:])}


def _without(rows: Rows, name: str, left_out: Tensor) -> dict[str, Tensor]:
    """Return the rows of all data sets without some of one; no empty data set."""
    rest = {**rows, name: rows[name][~torch.isin(rows[name], left_out)]}
    return {key: index for key, index in rest.items() if len(index)}


def _wins(known: Tensor, outliers: Tensor) -> Tensor:
    """Return 1 where an outlier is less certain than a known example, 0.5 for ties."""
    inside, outside = (score_logits(part.float(), "msp").double() for part in (known, outliers))
    difference = outside[:, None] - inside[None]
    return (difference.sign() + 1) / 2


def _weights(size: int, generator: torch.Generator) -> Tensor:
    """Return the shares of the examples in each draw, `[draw, example]`."""
    picked = torch.randint(size, (DRAWS, size), generator=generator)
    counts = torch.zeros(DRAWS, size, dtype=torch.float64)
    return counts.scatter_add_(1, picked, torch.ones_like(counts)) / size
