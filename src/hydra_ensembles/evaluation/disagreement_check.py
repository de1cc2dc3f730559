"""Does the members' disagreement detect outliers? A figure and a plain sentence."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .figures import OOD, Examples
from .intervals import Interval, percentiles, resamples
from .metrics import Order, Separation, once
from .tables import shown

DRAWS = 200
USEFUL = 0.6
"""AUROC that the lower end of the interval must exceed for disagreement to serve as an alarm."""


def check_disagreement(
    examples: Examples, *, members: int, score: str, seed: int = 0
) -> dict[str, Any] | None:
    """Measure the AUROC of mutual information by group of outliers, and say what it is worth.

    Args:
        examples: Columns of the known data (`id`) and of outliers, as `evaluate` makes them.
        members: Number of members.
        score: The uncertainty to compare with.
        seed: Of the draws.

    Returns:
        `auroc` with its interval by group, `useful` (on every group) and a `sentence`; None
        without outliers, or with one member, which cannot disagree.

    Example:
        >>> results = evaluate(ensemble, test, ood={"textures": textures})
        >>> results.settings["disagreement"]["sentence"]
    """
    groups: dict[str, list[str]] = {}
    for name in examples:
        if name.startswith(OOD):
            groups.setdefault(name.removeprefix(OOD).split("/")[0], []).append(name)
    if members == 1 or not groups:
        return None
    found, others = {}, {}
    for group, names in groups.items():
        columns = [
            torch.cat([examples[name][column] for name in names])
            for column in ("mutual_information", f"score:{score}")
        ]
        known = [examples["id"][key] for key in ("mutual_information", f"score:{score}")]
        found[group] = _auroc(known[0], columns[0], seed)
        others[group] = _auroc(known[1], columns[1], seed).value
    useful = all(auroc.low > USEFUL for auroc in found.values())
    rate = functools.partial(shown, "ood/AUROC")  # as tables round it
    figures = ", ".join(
        f"{rate(auroc.value)} [{rate(auroc.low)}, {rate(auroc.high)}] on {group} ({score}: "
        f"{rate(others[group])})"
        for group, auroc in found.items()
    )
    start = (
        "Disagreement separates outliers from known data"
        if useful
        else "Do not use disagreement as an alarm here"
    )
    return {
        "auroc": {group: list(auroc) for group, auroc in found.items()},
        "useful": useful,
        "sentence": f"{start}: AUROC {figures}.",
    }


def _auroc(known: Tensor, outliers: Tensor, seed: int) -> Interval:
    """Return the AUROC of a score with its bootstrap interval."""
    good, bad = Order(known), Order(outliers)
    apart = Separation(good, bad)
    sizes = {"id": len(known), "ood": len(outliers)}
    draws = [
        apart.figures(good.weigh(counts["id"]), bad.weigh(counts["ood"]))["AUROC"]
        for counts in resamples(sizes, count=DRAWS, seed=seed)
    ]
    value = apart.figures(good.weigh(once(len(known))), bad.weigh(once(len(outliers))))["AUROC"]
    return Interval(float(value), *percentiles(torch.cat(draws)))
